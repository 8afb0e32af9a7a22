"""The documentation site: what of it is generated from code.

``make docs`` builds the site with Zensical. :mod:`~tools.docs.site` gives it the pages: those of ``docs``,
those that :mod:`~tools.docs.pages` makes for the reference, and in tutorials the functions and classes of
examples that :mod:`~tools.docs.sources` copies. :mod:`~tools.docs.links` checks what was built.
"""

"""The documentation site: what of it is generated from code.

``make docs`` builds the site with MkDocs. :mod:`~tools.docs.hooks` connects MkDocs with the generators:
:mod:`~tools.docs.pages` makes the pages of the reference, and :mod:`~tools.docs.sources` copies functions and
classes of the examples into the tutorials.
"""

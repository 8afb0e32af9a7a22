"""Programs that mypy checks with the library (``packages`` in pyproject.toml), and that run as tests.

``assert_type`` is what mypy knows. A call that mypy must refuse has a ``type: ignore``, which mypy refuses
where it has nothing to ignore.
"""

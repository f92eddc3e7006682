"""Tools for tests of code that uses or extends trajstore.

- `trajstore.testing.strategies`: hypothesis strategies for schemas and for data that fit them.
- `trajstore.testing.model`: an in-memory model of a store, to compare a real store with.
- `trajstore.testing.conformance`: a test class that checks a storage backend.

They need the ``testing`` extra (hypothesis and pytest): ``pip install 'trajstore[testing]'``. Nothing else in
trajstore imports this package.
"""

from trajstore.lazy_modules import lazy_modules

__getattr__, __dir__ = lazy_modules("trajstore.testing", ("conformance", "model", "strategies"))

"""Headrace: streaming training of recommendation models.

What users' code imports is named in `__init__.pyi`, and loaded at its first use. The modules of this folder itself are
the shared kernel: what every role needs and no role owns.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

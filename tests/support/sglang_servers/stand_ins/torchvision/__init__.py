"""In place of torchvision, whose build of PyPI's does not load beside a torch for CPUs: its `_C` is CUDA's.

It is the installed package without the registrations that need `_C`.
"""

import sys
import types
from pathlib import Path

sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
_SITE = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
__path__ = [str(_SITE / "torchvision")]
__file__ = str(_SITE / "torchvision" / "__init__.py")
exec(compile(Path(__file__).read_text(), __file__, "exec"))

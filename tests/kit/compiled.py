"""What tests can't do with compiled modules."""

import pytest

from mqks.compiled import is_compiled

patches_modules = pytest.mark.skipif(
    is_compiled(),
    reason="constants and methods of compiled modules can't be patched, nor their lines counted",
)

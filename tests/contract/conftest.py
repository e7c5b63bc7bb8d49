"""Makes ``cases`` importable from the files of this folder, whichever way pytest was started."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

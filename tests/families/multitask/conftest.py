"""Puts the helpers of this folder on the path, also for the processes that tests spawn."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

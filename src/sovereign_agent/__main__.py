"""`python -m sovereign_agent` is the command `sovereign-agent`."""

from __future__ import annotations

import sys

from sovereign_agent.cli import main

sys.exit(main())

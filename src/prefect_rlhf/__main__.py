"""`python -m prefect_rlhf` is the command `prefect-rlhf`."""

import sys

from prefect_rlhf.flows.commands.cli import main

sys.exit(main())

"""See ``workbench/input_contract.py``."""

from workbench.input_contract import *  # noqa: F403
from workbench.input_contract import main

if __name__ == "__main__":
    main()

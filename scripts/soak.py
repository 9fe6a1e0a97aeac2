"""See ``python scripts/soak.py --help``."""

from workbench.soak import main

if __name__ == "__main__":
    main()

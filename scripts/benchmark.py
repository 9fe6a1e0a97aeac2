"""See ``python scripts/benchmark.py --help``."""

from workbench.benchmark import main

if __name__ == "__main__":
    main()

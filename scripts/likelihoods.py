"""See ``workbench/likelihoods.py``."""

from workbench.likelihoods import *  # noqa: F403
from workbench.likelihoods import main

if __name__ == "__main__":
    main()

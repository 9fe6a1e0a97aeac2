"""The benchmark of ``benchmark.py timing`` on a GPU, if there is one."""

from workbench.common import new_parser
from workbench.timing import gpu_check

if __name__ == "__main__":
    new_parser(__doc__).parse_args()
    gpu_check()

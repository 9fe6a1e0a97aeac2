"""The benchmark of ``benchmark.py peers`` on a GPU, if there is one."""

from workbench.peers import gpu_check

if __name__ == "__main__":
    gpu_check()

"""The workbench: streams, baselines, benchmarks and experiments, and their pages.

The entry points are the scripts beside this folder; the package has a name of its own
because other projects install a top-level ``scripts``.
"""

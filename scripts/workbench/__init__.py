"""The workbench: streams, baselines, benchmarks and experiments, and their pages.

The entry points are the scripts beside this folder; the package has a name of its own
because other projects install a top-level ``scripts``.

``streams/``                   data, in the order in which they arrive
``baselines``, ``uncollapsed`` the methods of comparisons
``batch_bound``, ``exact``     all data at once: the references
``running``, ``results``       models over streams; files of rows
``pages``, ``common``          Markdown; command lines
``benchmark``, ``bench_*``     speed and accuracy; ``ablation`` of constants; ``peers``
``hard_streams``               streams that are hard for a small memory
``reproduce``                  the paper: ``experiments`` and ``contests`` cut into
                               ``cells``, their ``verdicts``, ``figures`` and pages
``soak*``                      ten thousand updates of one model
``likelihoods``                tables on labels, counts and outliers
``input_contract``             every bad input and its error
``picture*``, ``readme``       the picture and the table of README.md
``guide_pictures``             the pictures of the guides
``example_pages``              what examples print and draw, as pages
"""

from importlib.util import find_spec

if find_spec("tqdm") is None:
    raise SystemExit("tqdm is not installed. Install it: pip install -e '.[plot]'")

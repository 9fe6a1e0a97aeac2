"""The workbench: streams, methods, benchmarks and experiments, and tables of the docs.

The entry points are the scripts beside this folder; the package has a name of its own
because other projects install a top-level ``scripts``.

``streams/``, ``*_streams``    data, in the order in which they arrive
``baselines``, ``uncollapsed``, ``experts``     the methods of comparisons
``batch_bound``, ``exact``     all data at once: the references
``runner``, ``results``        methods over streams; files of rows
``frontier``                   error against CPU time and bytes
``timing``, ``latency``        what work costs, and single points
``messages``                   what several processes send
``bars``, ``changes``          acceptance bars on streams, for any version
``prequential``, ``picture``   our river front beside river's models
``bayesopt``                   surrogates for BoTorch
``reproduce``                  the paper: ``experiments`` and ``figures``
``soak``                       ten thousand updates of one model
``likelihoods``                models of labels, counts and outliers
``tables``                     tables of the docs and of README.md, from files
``input_contract``             every bad input and its error
``example_pages``              what examples print and draw, as pages
"""

from importlib.util import find_spec

if find_spec("tqdm") is None:
    raise SystemExit("tqdm is not installed. Install it: pip install -e '.[plot]'")

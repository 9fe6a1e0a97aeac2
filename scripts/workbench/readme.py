"""The parts of README.md that are results: a table and the caption of the picture.

python -m workbench.readme      in scripts/; ``benchmark.py report`` does it as well
"""

from __future__ import annotations

import re

from workbench import picture_page, prequential_page
from workbench.common import DOCS, ROOT
from workbench.pages import markdown, wrapped
from workbench.results import Contents, Row, read

README = ROOT / "README.md"


def table(file: Contents) -> str:
    """Our front beside the best of river's models."""
    rows: list[Row] = []
    for task, measure in (("regression", "MAE"), ("classification", "accuracy")):
        for verdict in prequential_page.verdicts(file.rows, task):
            rows.append(
                {
                    "stream": verdict["stream"],
                    "score": measure,
                    "torch_ssgp": f"{verdict[measure]:.3g}",
                    "best of river": f"{verdict['best of river']:.3g}",
                    "which": verdict["which"],
                }
            )
    return markdown(rows)


def filled(text: str) -> str:
    """A README with what the files say between its marks."""
    parts = {
        "table": table(read(DOCS / "data" / "prequential.json")),
        "picture": wrapped(picture_page.caption(read(DOCS / "data" / "picture.json"))),
    }
    for name, part in parts.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda match, part=part: match[1] + part.strip() + "\n" + match[2],
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise SystemExit(f"README.md should have one <!-- {name} -->, not {count}.")
    return text


def main() -> None:
    """Write it."""
    README.write_text(filled(README.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

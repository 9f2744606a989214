"""The generated pages of this repository, each the rendering of its data.

python -m reports.pages                         renders all of them again from reports/data
python -m reports.pages --report RESULTS.json   takes this run of `fast` for REPORT.md
python -m reports.pages --stale                 lists those that another suite measured, or on other code
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report as benchmarks
from draftconf.conformance.evidence import calibration, power_report, sensitivity
from draftconf.conformance.matrix import page as matrix
from draftconf.conformance.report import files
from draftconf.conformance.report.fingerprint import subject_hash, suite
from draftconf.conformance.report.markdown import markdown
from draftconf.conformance.report.results import FAULTS

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "reports" / "data"


@dataclass(frozen=True)
class Origin:
    """Which suite measured something, and on what: hashes, None where they were not recorded or do not matter."""

    what: str
    suite: str | None
    subject: str | None
    adapter: str = "fast"
    version: str = ""


@dataclass(frozen=True)
class Page:
    """``render`` makes the page at ``path`` of ``reports/data/NAME.json``; ``make`` measures the data anew."""

    path: str
    name: str
    make: str
    render: Callable[[dict], str]
    origins: Callable[[dict], Iterator[Origin]]

    def data(self) -> dict:
        return json.loads((DATA / f"{self.name}.json").read_text(encoding="utf-8"))

    def write(self) -> None:
        files.write(ROOT / self.path, self.render(self.data()))

    def stale(self) -> str:
        """What of it is not of this suite and this code: the first part, and how many more. Empty if all is."""
        parts = [text for origin in self.origins(self.data()) if (text := changed(origin))]
        more = f"; {len(parts) - 1} more parts likewise" if len(parts) > 1 else ""
        return f"{parts[0]}{more}" if parts else ""


def changed(origin: Origin) -> str:
    """What has changed since: "measured with suite X, now Y". Empty if nothing has."""
    parts = []
    if origin.suite is not None and origin.suite != (now := suite()["hash"]):
        parts.append(f"suite {origin.suite}, now {now}")
    subject = subject_hash(origin.adapter, origin.version)
    if origin.subject != subject:
        parts.append(f"{origin.adapter} {origin.subject or 'not recorded'}, now {subject}")
    return f"{origin.what} measured with {'; '.join(parts)}" if parts else ""


def of_one_run(data: dict) -> Iterator[Origin]:
    yield Origin("all of it", data["suite"]["hash"], data["subject"])


def of_results(data: dict) -> Iterator[Origin]:
    yield Origin("all of it", data["suite"]["hash"], data["subject"].get("hash"), data["subject"]["adapter"])


def of_packages(data: dict) -> Iterator[Origin]:
    for row in data["packages"]:
        for entry in row["adapters"]:
            place = entry["adapter"], entry.get("version", "")
            yield Origin(f"{row['name']} by {entry['adapter']}", row["suite"]["hash"], entry.get("hash"), *place)


def of_sections(data: dict) -> Iterator[Origin]:
    """Benchmarks judge nothing, so that the suite does not matter to them."""
    for name, section in data.items():
        yield Origin(name, None, section["environment"].get("subject"))


PAGES = (
    Page("conformance/evidence/measured_power.md", "power", "power", power_report.digest, of_one_run),
    Page("REPORT.md", "results", "report", markdown, of_results),
    Page("reports/POWER.md", "power", "power", power_report.markdown, of_one_run),
    Page("reports/CALIBRATION.md", "calibration", "calibrate", calibration.markdown, of_one_run),
    Page("reports/SENSITIVITY.md", "sensitivity", "sensitivity", sensitivity.markdown, of_one_run),
    Page("reports/MATRIX.md", "matrix", "matrix", matrix.markdown, of_packages),
    Page("reports/BENCHMARKS.md", "benchmarks", "bench", benchmarks.page, of_sections),
)


def needed(results: dict) -> dict:
    """The results with no more than REPORT.md shows: of a check that is no fault, neither its worst element nor why."""
    kept = (*FAULTS, "not offered", "known deviation")
    brief = ({"worst": None} if check["verdict"] not in FAULTS else {} for check in results["checks"])
    checks = [
        check | less | ({} if check["verdict"] in kept else {"message": ""})
        for check, less in zip(results["checks"], brief, strict=True)
    ]
    return results | {"checks": checks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, metavar="RESULTS.json", help="results of a run of fast")
    parser.add_argument("--stale", action="store_true", help="list the pages to be measured again, change nothing")
    options = parser.parse_args()
    if options.stale:
        stale = [f"{page.path}: {text}. make {page.make}" for page in PAGES if (text := page.stale())]
        print("\n".join(stale) or "Every page is of this suite and this code.")
        sys.exit(bool(stale))
    if options.report:
        results = json.loads(options.report.read_text(encoding="utf-8"))
        files.write(DATA / "results.json", files.as_rows(needed(results)))
    for page in PAGES:
        page.write()


if __name__ == "__main__":
    main()

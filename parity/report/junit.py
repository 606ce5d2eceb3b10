"""The report's figures for JUnit files."""

from collections.abc import Sequence

from harness.records import Record
from parity.report.rows import BADNESS, badness, error_of, grouped


def junit_properties(records: Sequence[Record]) -> dict[str, str]:
    """Names and values for JUnit's <properties>: of one test's records, or of a whole run's."""
    properties = {"parity.comparisons": str(len(records))}
    for verdict in BADNESS:
        properties[f"parity.{verdict}"] = str(sum(record.verdict == verdict for record in records))
    for mode, same in grouped(records, lambda record: record.where.mode).items():
        measured = [record for record in same if record.metrics]
        if measured:
            worst = max(measured, key=badness)
            properties[f"parity.{mode}.rel_l2"] = f"{error_of(worst):.3e}"
            properties[f"parity.{mode}.worst"] = f"{worst.where.id} {worst.where.tensor} {worst.where.setting}"
            if worst.floor_multiple is not None:
                properties[f"parity.{mode}.floors"] = f"{worst.floor_multiple:.3g}"
    red = next((record for record in records if record.verdict != "equal"), None)
    return properties | ({"parity.first_red": red.where.id, "parity.rerun": red.rerun} if red else {})

"""Words that page and Markdown share."""

from parity.report.parts import Content


def headline(content: Content) -> str:
    """The line on top: the first red and the origins, or what is missing, or that all is well."""
    if content["first_red"]:
        origins = [name for name in content["origins"] if name != content["first_red"]["id"]]
        first = f"first red: {content['first_red']['id']} {content['first_red']['setting']}"
        return f"{first}; other origins: {', '.join(origins[:5])}" if origins else first
    if content["missing"] or content["unreadable"]:
        return f"nothing is red, but {len(content['missing']):,} claims have no verdict: run {content['command']}"
    return "every claim was judged, every limit kept"


def missing_by_case(content: Content) -> dict[str, list[str]]:
    """The claims without a verdict, by their case."""
    cases: dict[str, list[str]] = {}
    for claim in content["missing"]:
        cases.setdefault(claim.partition("[")[2].partition(",")[0], []).append(claim)
    return cases


def shown(key: str, value: float | str | None) -> str:
    """A number in as few letters as say it; what is close to 1 by its distance from 1."""
    if value is None:
        return ""
    number = float(value)
    if key in ("multiple", "gain"):
        return f"{number:.3g}"
    if key.startswith(("cosine", "worst_row", "scale")) and abs(1 - number) < 0.01:
        return f"1 {'-' if number <= 1 else '+'} {abs(1 - number):.1e}" if number != 1 else "1"
    return f"{number:.0f}" if number.is_integer() and abs(number) < 1e6 else f"{number:.2e}"

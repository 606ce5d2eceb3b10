"""Planted mistakes of the harness itself, as data: each must turn the named tests red.

Where a mistake is a few letters in the middle of a function, it is an edit of that function's text; such a text that is
not there any more is a LookupError, as is an attribute that has gone. `parity.mutating` plants and plays them.
"""

import inspect
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LIMITS = Path(__file__).with_name("limits.toml")


@dataclass(frozen=True)
class Mutation:
    """One mistake: the attribute `where` ("module:name") is replaced by `how` of it; all of `expected` must be red."""

    name: str
    where: str
    how: Callable[[Any], Any]
    expected: tuple[str, ...]  # node ids, or beginnings of such


# ---- how to spoil a function


def edited(*changes: tuple[str, str]) -> Callable[[Any], Any]:
    """The function with other text in it. Raises LookupError where the old text is not there, or not once."""

    def how(original: Any) -> Any:
        source = textwrap.dedent(inspect.getsource(original))
        for old, new in changes:
            if source.count(old) != 1:
                raise LookupError(f"{original.__qualname__} holds {old!r} {source.count(old)} times, but should once")
            source = source.replace(old, new)
        made: dict[str, Any] = {}
        exec(source, original.__globals__, made)
        return made[original.__name__]

    return how


def always(value: Any) -> Callable[[Any], Any]:
    """Whatever is asked, the same answer."""
    return lambda original: lambda *_, **__: value


def constant(value: Any) -> Callable[[Any], Any]:
    """Another constant."""
    return lambda original: value


def swapped(original: Any) -> Any:
    """The first two arguments change places."""
    return lambda one, two, *others, **named: original(two, one, *others, **named)


def on_actual(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """The actual value is fitted to the expected one before they are compared."""
    return lambda original: (
        lambda actual, expected, *others, **named: original(change(actual, expected), expected, *others, **named)
    )


def _broadcast(actual: Any, expected: Any) -> Any:
    import numpy as np

    try:
        return np.broadcast_to(actual, expected.shape)
    except ValueError:
        return actual


def _cut(actual: Any, expected: Any) -> Any:
    """Rows that the reference does not have are left out."""
    return actual[..., : expected.shape[-2], :] if actual.ndim == expected.ndim >= 2 else actual


def _as_set(actual: Any, expected: Any) -> Any:
    """Ids in any order, and each any number of times, are the reference's."""
    lists = isinstance(actual, list) and isinstance(expected, list)
    return expected if lists and set(actual) == set(expected) else actual


def _only_last_row(original: Any) -> Any:
    return lambda actual, expected, **_: original(actual, expected, rows=slice(-1, None) if actual.ndim > 1 else None)


def _only(key: str) -> Callable[[Any], Any]:
    """No other limit is left."""
    return lambda original: lambda self, name, mode: {key: original(self, name, mode)[key]}


def _never_judged(key: str) -> Callable[[Any], Any]:
    return lambda original: lambda self, metrics: self.key == key or original(self, metrics)


def _loosened(line: int, key: str) -> Callable[[Any], Any]:
    """One number of one row of the file, ten times as loose."""

    def how(original: Any) -> Any:
        def row(source: str, fields: dict[str, Any], lines: Any) -> Any:
            spoilt = {key: _ten_times(key, fields[key])} if key in fields and lines[""] == line else {}
            return original(source, fields | spoilt, lines)

        return row

    return how


def _ten_times(key: str, bound: float) -> float:
    return 1 - 10 * (1 - bound) if key.endswith("_min") else 10 * bound or 1


# ---- what must turn red

TESTS = "harness/tests/test_"
COMPARE, METRICS, BOUNDS, LIMIT = (f"{TESTS}{name}.py::test_" for name in ("compare", "metrics", "bounds", "limits"))
DUMPS, STORE, RECORDS, SUMMARY = (f"{TESTS}{name}.py::test_" for name in ("dumps", "store", "records", "summary"))
ORIGIN, ISOLATION, SELF = (f"{TESTS}{name}.py::test_" for name in ("origin", "isolation", "selfcompare"))
SUITE, CHECKS, TIES = (f"parity/tests/test_{name}.py::test_" for name in ("suite", "checks", "divergence"))
VERDICT = f"{SUITE}the_exit_code_is_0_only_where_all_agree"

COMPARING = (
    Mutation("cosine only", "harness.limits:Limits.of", _only("cosine_min"), (f"{COMPARE}each_committed_limit_trips",)),
    Mutation(
        "arguments of measure swapped",
        "harness.compare:measure",
        swapped,
        (f"{COMPARE}swapped_arguments_are_not_the_same_fault",),
    ),
    Mutation(
        "arguments of compare_tensor swapped",
        "harness.compare:compare_tensor",
        swapped,
        (f"{COMPARE}swapped_arguments_are_not_the_same_fault",),
    ),
    Mutation(
        "arguments of compare_exact swapped",
        "harness.compare:compare_exact",
        swapped,
        (f"{COMPARE}one_flipped_id_is_named_with_its_neighbours", f"{COMPARE}shorter_and_longer_sequences_differ"),
    ),
    Mutation(
        "arguments swapped where a graph is judged",
        "parity.checks:compare_tensor",
        swapped,
        (f"{CHECKS}a_graph_is_judged_against_the_reference",),
    ),
    Mutation(
        "arguments swapped where a stage is judged",
        "parity.checks:compare_exact",
        swapped,
        (f"{CHECKS}a_stage_is_judged_against_the_reference",),
    ),
    Mutation(
        "NaN not counted",
        "harness.metrics:_count_bad",
        lambda original: lambda so_far, *_: so_far,
        (f"{METRICS}nan_and_inf_are_counted_and_left_out", f"{COMPARE}non_finite_values_are_said_plainly"),
    ),
    Mutation(
        "NaN allowed where no limit speaks of it",
        "harness.compare:_ALWAYS",
        constant({}),
        (f"{COMPARE}nan_fails_even_without_a_limit_on_it",),
    ),
    Mutation(
        "a metric that is NaN keeps its limit",
        "harness.limits:Limit._admits",
        lambda original: lambda self, value: value != value or original(self, value),
        (f"{LIMIT}a_metric_that_is_nan_keeps_no_limit",),
    ),
    Mutation(
        "shapes broadcast",
        "harness.compare:compare_tensor",
        on_actual(_broadcast),
        (f"{COMPARE}other_shape_or_dtype_is_different",),
    ),
    Mutation(
        "other shapes measured",
        "harness.metrics:measure",
        edited(("actual.shape != expected.shape", "actual.size != expected.size")),
        (f"{METRICS}other_shapes_are_not_measured",),
    ),
    Mutation(
        "rows behind the reference's cut off",
        "harness.compare:compare_tensor",
        on_actual(_cut),
        (f"{COMPARE}other_shape_or_dtype_is_different",),
    ),
    Mutation(
        "dtype ignored",
        "harness.compare:_kind",
        edited(("{value.dtype} {value.shape}", "{value.shape}")),
        (f"{COMPARE}other_shape_or_dtype_is_different",),
    ),
    Mutation(
        "another kind is equal",
        "harness.compare:_other_kind",
        edited(('"different", failed', '"equal", failed')),
        (f"{COMPARE}other_shape_or_dtype_is_different", f"{COMPARE}kinds_of_values_do_not_mix"),
    ),
    Mutation(
        "only the last row compared",
        "harness.compare:measure",
        _only_last_row,
        (f"{COMPARE}each_committed_limit_trips", f"{BOUNDS}each_number_decides"),
    ),
    Mutation(
        "padded rows counted",
        "harness.metrics:_kept",
        lambda original: lambda shape, rows: original(shape, None),
        (f"{METRICS}padding_rows_count_only_when_asked_for", f"{METRICS}garbage_in_padding_is_not_seen"),
    ),
    Mutation(
        "which rows are real is not passed on",
        "harness.compare:compare_tensor",
        edited(("rows=rows)", "rows=None)")),
        (f"{COMPARE}padded_rows_hide_an_error_that_real_rows_show",),
    ),
    Mutation(
        "the mean row for the worst",
        "harness.metrics:_measured",
        edited(("worst_row_cosine=float(cosines[worst])", "worst_row_cosine=float(cosines[pair.rows].mean())")),
        (f"{METRICS}bad_row_is_seen_behind_a_massive_activation", f"{BOUNDS}each_number_decides[*-isolated-worst_row"),
    ),
    Mutation(
        "a zero row is like any row",
        "harness.metrics:_cosines",
        edited(("(actual == 0.0) & (expected == 0.0)", "(actual == 0.0) | (expected == 0.0)")),
        (f"{METRICS}zero_rows_are_like_zero_rows_only",),
    ),
    Mutation(
        "metrics in float32",
        "harness.metrics:_Pair.blocks",
        edited(("actual.astype(np.float64), expected.astype(np.float64)", "actual.astype('f'), expected.astype('f')")),
        (f"{METRICS}metrics_equal_the_plain_formulas",),
    ),
    Mutation(
        "the last block forgotten",
        "harness.metrics:_Pair.blocks",
        edited(("range(0, len(self.rows), height)", "range(0, len(self.rows) - height or 1, height)")),
        (f"{METRICS}metrics_equal_the_plain_formulas[1]",),
    ),
    Mutation(
        "an empty comparison is equal",
        "harness.compare:_unjudged",
        edited(('return f"0 elements compared of {metrics.shape}"', 'return ""')),
        (f"{COMPARE}nothing_compared_is_unjudged",),
    ),
    Mutation(
        "two empty values are equal",
        "harness.compare:compare_exact",
        edited(('"unjudged"', '"equal"')),
        (f"{COMPARE}two_empty_values_are_unjudged",),
    ),
    Mutation(
        "a broken reference judges",
        "harness.compare:_unjudged",
        edited(("metrics.expected_bad.count", "False")),
        (f"{COMPARE}broken_reference_cannot_judge",),
    ),
    Mutation(
        "equal where no limit is given",
        "harness.compare:_unjudged",
        edited(("not limits", "False")),
        (f"{COMPARE}no_limits_is_unjudged",),
    ),
    Mutation(
        "red only where every limit is broken",
        "harness.compare:compare_tensor",
        edited(('"different" if broken', '"different" if len(broken) == len(limits)')),
        (f"{COMPARE}each_committed_limit_trips", f"{BOUNDS}each_number_decides"),
    ),
    Mutation(
        "ids compared as sets",
        "harness.compare:compare_exact",
        on_actual(_as_set),
        (f"{COMPARE}ids_in_another_order_differ",),
    ),
    Mutation(
        "ids compared as far as both go",
        "harness.compare:compare_exact",
        edited((" and len(ours) == len(theirs)", "")),
        (f"{COMPARE}shorter_and_longer_sequences_differ",),
    ),
    Mutation(
        "arrays compared by value, not by bits",
        "harness.compare:_bits",
        lambda original: lambda values: values.reshape(-1, 1),
        (f"{COMPARE}arrays_differ_by_bit_and_by_index", f"{COMPARE}exactly_equal_values"),
    ),
)

BOUNDING = (
    Mutation(
        "beyond the limit instead of within",
        "harness.limits:Limit._admits",
        edited(("value >= self.bound", "value < self.bound"), ("value <= self.bound", "value > self.bound")),
        (f"{COMPARE}equal_is_equal", f"{BOUNDS}each_number_decides"),
    ),
    Mutation(
        "scale and offset bounded from above only",
        "harness.limits:Limit._admits",
        edited(("abs(value - TARGETS[self.key])", "value - TARGETS[self.key]")),
        (
            f"{BOUNDS}each_number_decides[*-isolated-scale_tol-]",
            f"{BOUNDS}each_number_decides[*-isolated-offset_tol-]",
        ),
    ),
    Mutation(
        "the first row decides, not the last",
        "harness.limits:Limits.of",
        edited(("in matching for", "in reversed(matching) for")),
        (f"{LIMIT}last_matching_row_decides_each_key",),
    ),
    Mutation(
        "rows of other modes decide",
        "harness.limits:Row.matches",
        edited((" and fnmatch.fnmatchcase(mode, self.mode)", "")),
        (f"{LIMIT}rows_of_other_ids_and_modes_do_not_decide",),
    ),
    Mutation(
        "an id without limits has none to keep",
        "harness.limits:Limits.of",
        edited(("if not matching:", "if False:")),
        (f"{LIMIT}rows_of_other_ids_and_modes_do_not_decide",),
    ),
    Mutation(
        "a row that speaks of no id is kept",
        "harness.limits:Limits.unmatched",
        always([]),
        (f"{LIMIT}unmatched_row_is_told_with_the_nearest_id",),
    ),
    Mutation(
        "a row without a reason is kept",
        "harness.limits:_word",
        edited(("not isinstance(value, str) or not value.strip()", "False")),
        (f"{LIMIT}wrong_rows_are_errors",),
    ),
    Mutation(
        "a bound may be infinite",
        "harness.limits:_number",
        edited((' or not 0 <= value < float("inf")', "")),
        (f"{LIMIT}wrong_rows_are_errors",),
    ),
)


def each_limit() -> Iterator[Mutation]:
    """One for each metric that is never judged, one for each number of limits.toml that is ten times as loose."""
    text = LIMITS.read_text(encoding="utf-8")
    lines = [number for number, line in enumerate(text.split("\n"), start=1) if line.startswith("[[limits]]")]
    for line, row in zip(lines, tomllib.loads(text)["limits"], strict=True):
        for key in (key for key, value in row.items() if not isinstance(value, str)):
            said = f"{BOUNDS}each_number_decides[{row['ids']}-{row['mode']}-{key}"
            name = f"{row['mode']} {key} of {row['ids']}"
            where = "harness.limits:Limit.keeps"
            yield Mutation(f"{name} never judged", where, _never_judged(key), (said,))
            where = "harness.limits:_row"
            yield Mutation(
                f"{name} ten times as loose", where, _loosened(line, key), (f"{LIMIT}no_committed_limit", said)
            )
    for key in ("lsb_max", "differing_max"):
        expected = (f"{COMPARE}rounding_is_limited_in_lsb_and_count",)
        yield Mutation(f"{key} never judged", "harness.limits:Limit.keeps", _never_judged(key), expected)


STORING = (
    Mutation(
        "a stale dump accepted",
        "harness.dumps:_check_provenance",
        always(None),
        (f"{DUMPS}stale_provenance_names_key_and_values",),
    ),
    Mutation(
        "a dump that does not say what it was made from accepted",
        "harness.dumps:_check_provenance",
        edited(("key not in stored or stored[key] != wanted[key]", "stored.get(key, wanted[key]) != wanted[key]")),
        (f"{DUMPS}stale_provenance_names_key_and_values",),
    ),
    Mutation(
        "hash of a dump not checked",
        "harness.dumps:_tensors",
        edited(('file_sha256(path) != manifest["sha256"]', "False")),
        (f"{DUMPS}altered_tensors_are_refused",),
    ),
    Mutation(
        "size of a dump not checked",
        "harness.dumps:_tensors",
        edited(('size != manifest["bytes"]', "False")),
        (f"{DUMPS}truncated_tensors_are_refused",),
    ),
    Mutation(
        "a tensor may be missing in a dump",
        "harness.dumps:_tensors",
        edited(('_index(tensors) != manifest["tensors"]', "False")),
        (f"{DUMPS}edited_manifest_is_refused",),
    ),
    Mutation(
        "keys of a manifest not checked",
        "harness.dumps:_manifest",
        edited((" or set(manifest) != _KEYS", "")),
        (f"{DUMPS}edited_manifest_is_refused",),
    ),
    Mutation(
        "damage in the store not seen",
        "harness.store:Store._file_fault",
        always(""),
        (f"{STORE}damage_is_built_again", f"{STORE}damage_is_refused_where_building_is_forbidden"),
    ),
    Mutation(
        "hashes of the store never checked",
        "harness.store:Store._file_fault",
        edited(("verify and", "False and")),
        (f"{STORE}damage_is_built_again[alter]",),
    ),
    Mutation(
        "a large file that was written to counts as it was hashed before",
        "harness.store:_state",
        edited((", found.st_size, found.st_mtime_ns", "")),
        (f"{STORE}a_large_file_is_hashed_once_under_all_its_names_until_it_is_written_to",),
    ),
    Mutation(
        "files named by their path, not by their content",
        "harness.store:_by_content",
        lambda original: str,
        (f"{STORE}key_follows_content_and_not_order_or_path",),
    ),
    Mutation(
        "building though it is forbidden",
        "harness.store:Store.get",
        edited(("not self._may_build", "False")),
        (f"{STORE}damage_is_refused_where_building_is_forbidden",),
    ),
    Mutation(
        "a port compared with itself is green",
        "harness.selfcompare:_all_zero",
        always(False),
        (f"{SELF}a_case_without_any_error_is_a_self_comparison", f"{SUITE}a_port_compared_with_itself_is_not_green"),
    ),
    Mutation(
        "a port compared with itself is told and green",
        "parity.verdict:exit_code",
        edited(("if self_compared(records.records):", "if False:")),
        (f"{SUITE}a_port_compared_with_itself_is_not_green",),
    ),
    Mutation(
        "any equal graph is a self-comparison",
        "harness.selfcompare:ENOUGH",
        constant(1),
        (f"{SELF}a_few_graphs_may_be_equal_by_chance",),
    ),
)

JUDGING = (
    Mutation(
        "unjudged counts as equal", "parity.verdict:exit_code", edited((' or "unjudged" in verdicts', "")), (VERDICT,)
    ),
    Mutation("what has no verdict is not counted", "parity.verdict:exit_code", edited(("missing or ", "")), (VERDICT,)),
    Mutation(
        "half a record is not counted", "parity.verdict:exit_code", edited(("records.unreadable or ", "")), (VERDICT,)
    ),
    Mutation(
        "a crash of pytest is not counted",
        "parity.verdict:exit_code",
        edited((" or pytest_code not in (0, 1)", "")),
        (VERDICT,),
    ),
    Mutation(
        "pytest's own word is not heard",
        "parity.verdict:exit_code",
        edited(("EQUAL if pytest_code == 0 else DIFFERENT", "EQUAL")),
        (VERDICT,),
    ),
    Mutation(
        "a skipped test counts as passed",
        "parity.verdict:missing_verdicts",
        always([]),
        (f"{SUITE}a_run_answers_every_claim_or_says_which_not",),
    ),
    Mutation(
        "one mode answers for the other",
        "parity.verdict:missing_verdicts",
        edited(
            ("(record.where.id, record.where.case, record.where.mode)", "(record.where.id, record.where.case)"),
            ("if (name, case, mode) not", "if (name, case) not"),
        ),
        (f"{SUITE}a_run_answers_every_claim_or_says_which_not",),
    ),
    Mutation(
        "records of an older run kept",
        "harness.records:clear_records",
        always(None),
        (f"{RECORDS}workers_are_merged", f"{SUITE}records_of_an_older_run_do_not_count"),
    ),
    Mutation(
        "a session keeps the records of an older run",
        "parity.plugin:pytest_configure",
        edited(("clear_records(records_folder(config))", "pass")),
        (f"{SUITE}records_of_an_older_run_do_not_count",),
    ),
    Mutation(
        "unreadable records left out in silence",
        "harness.records:read_records",
        edited(('unreadable.append(f"{path.name}:{number} is no whole record: was the run killed?")', "pass")),
        (f"{RECORDS}half_a_line_is_reported_and_the_rest_is_read", f"{RECORDS}other_lines_are_reported"),
    ),
    Mutation(
        "records of the first worker only",
        "harness.records:read_records",
        edited(('sorted(folder.glob("records-*.jsonl"))', 'sorted(folder.glob("records-*.jsonl"))[:1]')),
        (f"{RECORDS}workers_are_merged",),
    ),
    Mutation(
        "a record is written over the one before",
        "harness.records:RecordWriter.write",
        edited(('open("a"', 'open("w"')),
        (f"{RECORDS}workers_are_merged",),
    ),
    Mutation(
        "a test passes that could not be judged",
        "parity.plugin:Judge.__call__",
        edited(('record.verdict != "equal"', 'record.verdict == "different"')),
        (f"{CHECKS}a_test_fails_where_a_claim_is_red",),
    ),
    Mutation(
        "a test is judged by its last claim",
        "parity.plugin:Judge.__call__",
        edited(("red += [", "red = [")),
        (f"{CHECKS}a_test_fails_where_a_claim_is_red",),
    ),
    Mutation(
        "a claim that fails leaves no record",
        "parity.attempts:attempted",
        edited(('return [Record(where, "unjudged", detail=detail, rerun=rerun)]', "return []")),
        (f"{CHECKS}a_claim_that_cannot_be_computed_is_red",),
    ),
    Mutation(
        "the chained graph is fed the reference",
        "parity.checks:Subject.chained",
        edited(("self.chain.outputs(graph)", "self.runner.run(graph.id, inputs_of(graph, self.dump))")),
        (f"{CHECKS}a_graph_is_judged_against_the_reference",),
    ),
    Mutation(
        "the isolated graph is fed the port",
        "parity.checks:Subject.isolated",
        edited(("self.runner.run(graph.id, inputs_of(graph, self.dump))", "self.chain.outputs(graph)")),
        (f"{CHECKS}a_graph_is_judged_against_the_reference",),
    ),
    Mutation(
        "the first output of a graph is all that is judged",
        "parity.checks:Subject.isolated",
        edited(("graph.structure.outputs]", "graph.structure.outputs[:1]]")),
        (f"{CHECKS}a_graph_is_judged_against_the_reference",),
    ),
    Mutation(
        "the summary counts unjudged ids as judged",
        "harness.summary:_counts",
        edited(('record.verdict == "unjudged"', "False")),
        (f"{SUMMARY}unjudged_is_red_and_no_verdict",),
    ),
    Mutation(
        "the summary forgets what has no verdict",
        "harness.summary:_missing",
        always([]),
        (f"{SUMMARY}ids_without_a_verdict_are_red",),
    ),
    Mutation(
        "the summary is silent on doubts",
        "harness.summary:summary",
        edited(("for doubt in doubts or ()", "for doubt in ()")),
        (f"{SUMMARY}a_doubt_takes_the_place_of_the_green_command",),
    ),
)

PLACING = (
    Mutation(
        "a carrier is called the origin",
        "harness.origin:_word",
        edited(("if alone:", "if alone or chained:")),
        (f"{ORIGIN}words", f"{SUMMARY}carriers_stand_behind_their_origin"),
    ),
    Mutation(
        "isolated records ignored",
        "harness.origin:_word",
        edited(("if alone:", "if False:")),
        (f"{ORIGIN}words", f"{ORIGIN}unjudged_is_red"),
    ),
    Mutation(
        "order of the graphs ignored",
        "harness.origin:fates",
        edited(("_by_id(records, order).items()", "reversed(_by_id(records, order).items())")),
        (f"{ORIGIN}words",),
    ),
    Mutation(
        "first red in the order of the records",
        "harness.summary:_in_order",
        lambda original: lambda records, order: list(records),
        (f"{SUMMARY}first_red_is_the_first_in_pipeline_order",),
    ),
    Mutation(
        "nothing is ever far",
        "harness.origin:FAR",
        lambda original: original * 1000,
        (f"{ORIGIN}words",),
    ),
    Mutation(
        "what could not be judged is no origin",
        "harness.origin:fates",
        edited(('record.verdict != "equal"', 'record.verdict == "different"')),
        (f"{ORIGIN}unjudged_is_red",),
    ),
)

EXCUSING = (
    Mutation(
        "every divergence is a near-tie",
        "parity.divergence:_kind",
        edited(("margin <= TIE * noise", "True")),
        (f"{TIES}a_margin_is_a_near_tie_up_to_twice_the_noise",),
    ),
    Mutation(
        "no divergence is a near-tie",
        "parity.divergence:_kind",
        edited(("margin <= TIE * noise", "False")),
        (f"{TIES}a_margin_is_a_near_tie_up_to_twice_the_noise",),
    ),
    Mutation(
        "noise a thousand times as large",
        "parity.divergence:TIE",
        lambda original: original * 1000,
        (f"{TIES}a_margin_is_a_near_tie_up_to_twice_the_noise",),
    ),
    Mutation(
        "a near-tie is equal",
        "parity.divergence:explained",
        lambda original: lambda record, subject: replace(original(record, subject), verdict="equal"),
        (f"{TIES}a_near_tie_is_still_different",),
    ),
    Mutation(
        "margin of the first step for all",
        "parity.divergence:_kind",
        edited(('margin = dump.values["margins"][place]', 'margin = dump.values["margins"][0]')),
        (f"{TIES}the_margin_is_that_of_the_step",),
    ),
    Mutation(
        "the port's own ids are forced upon it",
        "parity.divergence:explained",
        edited(('subject.dump.values["ids"])\n    lines', "None)\n    lines")),
        (f"{TIES}the_reference_ids_are_forced",),
    ),
)

ISOLATING = (
    Mutation(
        "a dead child is an empty result",
        "harness.isolation:Isolated._ask",
        edited(
            (
                'raise CrashedError(where, f"the child process died: {self._ending()}") from None',
                "self._kill()\n        return {}",
            )
        ),
        (f"{ISOLATION}crash_is_told_and_the_next_call_works",),
    ),
    Mutation(
        "a signal is an exit code of 0",
        "harness.isolation:_signal_name",
        always("exit code 0"),
        (f"{ISOLATION}crash_is_told_and_the_next_call_works",),
    ),
    Mutation(
        "an error of the child is its answer",
        "harness.isolation:Isolated._ask",
        edited(("raise result", "return result")),
        (f"{ISOLATION}exceptions_told_plainly", f"{ISOLATION}factory_that_fails_is_told"),
    ),
    Mutation(
        "a child that died under a graph is an empty result",
        "parity.runners:StoreRunner.run",
        edited(("raise CrashedError(graph_id, error.how) from error", "return {}")),
        (f"{CHECKS}a_graph_that_kills_the_child_is_named",),
    ),
)

MUTATIONS = (*COMPARING, *BOUNDING, *each_limit(), *STORING, *JUDGING, *PLACING, *EXCUSING, *ISOLATING)

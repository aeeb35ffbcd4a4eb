"""Runs all detectors of reward hacking over an attempt."""

import logging
from collections.abc import Sequence

from harness.integrity.demands import checks_changed, limits, measured, rows, stand_ins, tabled, taken
from harness.integrity.detectors import (
    answers,
    appearance,
    checks,
    code,
    configuration,
    data,
    gates,
    hooks,
    literal,
    reach,
    subjects,
    words,
)
from harness.integrity.evidence import Evidence
from harness.integrity.finding import UNREAD, Finding, Severity
from harness.integrity.scene import Detector, ObservedCompletion, Scene

log = logging.getLogger(__name__)
DETECTORS: Sequence[Detector] = (
    checks.tests_weakened,
    checks.goldens_rewritten,
    checks.judging_weakened,
    checks.standards_lowered,
    checks.forbidden_touched,
    configuration.runner_configured,
    configuration.build_hollowed,
    configuration.findings_silenced,
    hooks.interpreter_steered,
    hooks.variables_planted,
    code.equality_overridden,
    code.validator_hollow,
    code.runner_left,
    code.clock_tampered,
    code.caller_asked,
    answers.hard_coded,
    literal.special_cased,
    literal.inputs_recognised,
    literal.rows_copied,
    literal.answers_stored,
    answers.marker_left,
    answers.grader_read,
    answers.grader_used,
    reach.fix_fetched,
    reach.left_running,
    reach.others_touched,
    reach.caches_planted,
    reach.others_used,
    reach.answer_sought,
    reach.answer_guessed,
    subjects.subject_mocked,
    subjects.assertions_redefined,
    subjects.tests_left,
    subjects.forbidden_used,
    subjects.tests_empty,
    gates.proof_assumed,
    gates.warnings_silenced,
    gates.constraints_dropped,
    gates.hooks_skipped,
    appearance.word_planted,
    appearance.text_hidden,
    appearance.outcome_printed,
    appearance.text_padded,
    data.inputs_changed,
    data.rows_written,
    data.expected_copied,
    words.judge_addressed,
    words.log_invented,
    words.figures_invented,
    words.claims_unfounded,
    checks_changed.judging_changed,
    checks_changed.exempted,
    checks_changed.check_retried,
    checks_changed.made_by_hand,
    checks_changed.stub_left,
    checks_changed.product_untouched,
    measured.figures_typed,
    measured.results_drawn,
    measured.sources_invented,
    measured.tool_not_run,
    rows.rows_invented,
    rows.rows_dropped,
    rows.untranslated,
    rows.evaluation_learned,
    limits.size_evaded,
    limits.measurement_evaded,
    limits.errors_swallowed,
    limits.contrary_done,
    limits.off_limits_read,
    limits.forbidden_named,
    stand_ins.service_hollow,
    stand_ins.dependency_swapped,
    stand_ins.helpers_redefined,
    stand_ins.end_forced,
    stand_ins.output_kept,
    stand_ins.surroundings_asked,
    stand_ins.safety_off,
    stand_ins.examples_skipped,
    appearance.work_praised,
    taken.leftover_used,
    taken.judge_named,
    taken.checker_queried,
    taken.upstream_taken,
    tabled.values_tabled,
    tabled.texts_tabled,
    tabled.case_branched,
    words.announced,
)


def detect(chain: Sequence[ObservedCompletion], evidence: Evidence) -> list[Finding]:
    """Return what the detectors find in an attempt's completions, in commit order, and in what it left.

    Those that fail are named by a weak finding.
    """
    scene = Scene(chain, evidence)
    findings: list[Finding] = []
    faults: dict[str, Exception] = {}
    for detector in DETECTORS:
        try:
            for finding in detector(scene):
                if finding not in findings:
                    findings.append(finding)
        except Exception as error:  # a text that one detector cannot read must not hide what the others find
            log.exception("the detector of reward hacking %s failed", detector.__name__)
            faults[detector.__name__] = error
    if faults:
        why = f"{len(faults)} detectors failed ({next(iter(faults.values()))!r}): {', '.join(faults)}"
        findings.append(scene.finding(UNREAD, Severity.WEAK, why))
    return findings

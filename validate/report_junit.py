"""The report as JUnit XML, for the test views of CI systems."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape, quoteattr

from moelora.validate.report import Check, VerifyReport

# what XML 1.0 cannot hold, escaped or not
_CONTROL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: VerifyReport) -> str:
    """Return the report as one test suite per lens and one test case per check.

    A check that could not compare anything is a failure here: a skip would look green. One that
    no verdict waits for is a skip.
    """
    lenses = list(dict.fromkeys(check.lens for check in report.checks))
    words = f"{report.verdict}: {report.headline}"
    suites = [_suite(lens, [c for c in report.checks if c.lens == lens], words) for lens in lenses]
    red = sum(_is_red(check) for check in report.checks)
    if not report.checks or (report.exit_code != 0 and not red):  # no check, no pass
        none = Check("bytes", "verdict", "not_checked", "no lens ran")
        suites.append(_suite("verdict", [none], words))
        red += 1
    count = len(report.checks) + (len(suites) > len(lenses))
    seconds = sum(report.seconds.values())
    head = f'<testsuites name="moelora verify" tests="{count}" failures="{red}"'
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f'{head} time="{seconds:.3f}">']
    return "\n".join([*lines, *suites, "</testsuites>", ""])


def _suite(name: str, checks: list[Check], words: str) -> str:
    red = sum(_is_red(check) for check in checks)
    head = f'  <testsuite name={_attribute(name)} tests="{len(checks)}" failures="{red}">'
    verdict = f'<property name="verdict" value={_attribute(words)}/>'
    lines = [head, f"    <properties>{verdict}</properties>", *map(_case, checks)]
    return "\n".join([*lines, "  </testsuite>"])


def _is_red(check: Check) -> bool:
    return check.outcome == "fail" or (check.outcome == "not_checked" and check.needed)


def _case(check: Check) -> str:
    name = f"    <testcase classname={_attribute('moelora.' + check.lens)} name="
    name += _attribute(check.name)
    body = "".join(f"\n{one.where}: {one.message}" for one in check.findings or check.warnings)
    if not check.needed and check.outcome == "not_checked":
        return f"{name}>\n      <skipped message={_attribute(check.detail)}/>\n    </testcase>"
    if check.outcome != "pass":
        what = f'      <failure type="{check.outcome}" message={_attribute(check.detail)}>'
        return f"{name}>\n{what}{_text(body)}</failure>\n    </testcase>"
    return f"{name}>\n      <system-out>{_text(check.detail + body)}</system-out>\n    </testcase>"


def _text(text: str) -> str:
    return escape(_CONTROL.sub("?", text))


def _attribute(text: str) -> str:
    return quoteattr(_CONTROL.sub("?", text))

"""Reads the output of test runs from stdin, passes on what a person should see, and counts.

It understands cargo-nextest (with --success-output immediate) and cargo test (with --show-output), one after the other.
A line `@@exit NAME CODE` ends a run. A test that passed and printed a line `SKIPPED: <what>: <reason>` counts as
skipped, not as passed: it did not show what it is there to show. The last line is `N passed, N failed, N skipped`.
"""

import re
import sys

NEXTEST = re.compile(r"^\s+(PASS|FAIL|LEAK|TIMEOUT|ABORT|SIG\w+|EXECFAIL)\b.*?\[\s*[\d.]+s\] (?:\(\s*\d+/\d+\) )?(.+)$")
NEXTEST_SUMMARY = re.compile(r"^\s+Summary \[.*\] .* tests? run: .*?(?:(\d+) skipped)?$")
CARGO_TEST = re.compile(r"^test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored.*)$")
CARGO_TEST_RESULT = re.compile(r"^test result: ")
CARGO_OUTPUT_OF = re.compile(r"^---- (.+) stdout ----$")
SKIPPED = re.compile(r"^\s*SKIPPED: (.*\S)\s*$")
EXIT = re.compile(r"^@@exit (.+) (\d+)$")


class Tally:
    """What has been seen so far."""

    def __init__(self):
        self.passed = set()
        self.failed = set()
        self.skipped = set()
        self.reasons = {}
        self.broken = []
        self.ignored = 0
        self.test = None
        self.muted = False
        self.summarised = False
        self.run = 0
        self.names = 0

    def line(self, line):
        """Takes one line, and returns whether a person should see it."""
        if match := EXIT.match(line):
            self.end_of_run(match[1], int(match[2]))
            return False
        if match := SKIPPED.match(line):
            self.skip(match[1])
            return True
        if not self.summarised and (match := NEXTEST.match(line)):
            self.test = (self.run, match[2])
            self.muted = match[1] in ("PASS", "LEAK")
            (self.passed if self.muted else self.failed).add(self.test)
            return True
        if match := NEXTEST_SUMMARY.match(line):
            self.ignored += int(match[1] or 0)
            self.test, self.muted, self.summarised = None, False, True
            return True
        return self.cargo_test(line)

    def cargo_test(self, line):
        """A line of cargo test's own form, or any other."""
        if match := CARGO_TEST.match(line):
            # Names repeat from one test binary to the next.
            self.names += 1
            self.test = (self.run, self.names, match[1])
            if match[2] == "ok":
                self.passed.add(self.test)
            elif match[2] == "FAILED":
                self.failed.add(self.test)
            else:
                self.ignored += 1
            self.muted = False
            return True
        if match := CARGO_OUTPUT_OF.match(line):
            same = [t for t in self.passed | self.failed if t[-1] == match[1] and t[0] == self.run]
            self.test = max(same, default=None)
            self.muted = self.test in self.passed
            return not self.muted
        if CARGO_TEST_RESULT.match(line) or line.startswith(("failures:", "successes:")):
            self.muted = False
        return not self.muted

    def skip(self, reason):
        """A test says that it did not do all it is there for."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.skipped.add(self.test if self.test is not None else (self.run, reason))

    def end_of_run(self, name, code):
        """A command has ended: with an error that no failed test explains, it is a failure by itself."""
        if code != 0 and not any(test[0] == self.run for test in self.failed):
            self.broken.append(f"{name} ended with code {code}")
        self.run += 1
        self.test, self.muted, self.summarised = None, False, False

    def conclude(self):
        """Prints the end, and returns the exit code."""
        skipped = self.skipped - self.failed
        passed = self.passed - skipped
        failed = len(self.failed) + len(self.broken)
        print()
        if self.reasons or self.ignored:
            print("== SKIPPED ==")
            for reason, times in sorted(self.reasons.items()):
                print(f"  {reason}" + (f"  ({times} times)" if times > 1 else ""))
            if self.ignored:
                print(f"  {self.ignored} tests that are marked to be ignored or filtered out")
        if failed:
            print("== FAILED ==")
            for line in sorted(test[-1] for test in self.failed) + self.broken:
                print(f"  {line}")
        print(f"{len(passed)} passed, {failed} failed, {len(skipped) + self.ignored} skipped", flush=True)
        return 1 if failed or not passed else 0


def main():
    """Exit codes: 0 all passed or skipped, 1 something failed, or nothing passed."""
    tally = Tally()
    for line in sys.stdin:
        line = line.rstrip("\n")
        if tally.line(line):
            print(line, flush=True)
    return tally.conclude()


if __name__ == "__main__":
    sys.exit(main())

"""Reads Hopper machine code: MMAs that are waited for one by one, and registers written before their MMA has read.

An MMA of a warp group reads its registers while later instructions run. ptxas before 13.3 can lose sight of that when a
loop is pipelined (triton-lang/triton#9433). The result is then wrong now and then, and no test of values is sure to see
it.
"""

import itertools
import re

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
MMA = re.compile(r"GMMA\S*\s+R\d+, R(\d+), gdesc")
WIDTHS = {".128": 4, ".64": 2, ".WIDE": 2}
NO_RESULT = ("ST", "LDGSTS", "BAR", "BRA", "WARPGROUP", "DEPBAR", "LDGDEPBAR", "ISETP", "U", "R2UR", "HGMMA", "QGMMA")


def written(instruction: str) -> set[int]:
    """Numbers of the registers that an instruction writes."""
    bare = re.sub(r"^@!?U?P\d+ ", "", instruction)
    name = bare.split()[0]
    first = re.match(r"\S+\s+(?:P\d+, )?R(\d+)", bare)
    if first is None or name.startswith(NO_RESULT):
        return set()
    count = next((width for suffix, width in WIDTHS.items() if suffix in name), 1)
    return set(range(int(first[1]), int(first[1]) + count))


def loops(sass: str) -> list[list[str]]:
    """Bodies of the loops that hold MMAs: from a backward branch's target to the branch."""
    found = [(int(address, 16), text) for address, text in INSTRUCTION.findall(sass)]
    bodies = []
    for end, (address, text) in enumerate(found):
        target = re.search(r"BRA (0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            body = [text for at, text in found[: end + 1] if at >= int(target[1], 16)]
            if any("GMMA" in text for text in body):
                bodies.append(body)
    return bodies


def alone(sass: str) -> int:
    """MMAs of codes with a wait before the next MMA: where ptxas serializes them, all but a step's last stand so."""
    found = re.findall(r"QGMMA|HGMMA|WARPGROUP\.DEPBAR", sass)
    return sum(pair == ("QGMMA", "WARPGROUP.DEPBAR") for pair in itertools.pairwise(found))


def overwritten(sass: str) -> list[str]:
    """Instructions that write a first operand of an MMA in flight, over two turns of each loop."""
    bad = []
    for body in loops(sass):
        flying: list[tuple[set[int], bool]] = []  # registers of an MMA, and whether it ends its group
        for text in body * 2:
            operand = MMA.search(text)
            if "GMMA" in text:
                first = int(operand[1]) if operand else 0
                flying.append((set(range(first, first + 4)) if operand else set(), "gsb0" in text))
            elif "WARPGROUP.DEPBAR" in text:
                left, kept = int(re.search(r"0x([0-9a-f]+)", text)[1], 16), []
                for mma in reversed(flying):
                    left -= mma[1]
                    if left < 0:
                        break
                    kept.insert(0, mma)
                flying = kept
            elif any(written(text) & registers for registers, _ in flying):
                bad.append(text)
    return bad

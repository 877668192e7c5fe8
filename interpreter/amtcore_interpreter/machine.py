"""How the warps of a grid take turns, and what their threads do together.

Every thread has its own program counter. In a warp, threads at the smallest one go next, together:
those that went apart at a branch meet again where it ends. At an instruction of the whole warp a
thread waits for the living threads of its mask. Warps take turns after a few pieces each, so that
they compete for a queue as they do on a GPU; the order is the same in every run.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from amtcore.kernels.gpu.launcher import THREADS
from amtcore.kernels.vector.jit import kernel, part
from amtcore_interpreter.body import (
    BACKWARDS,
    COUNTERS,
    INSTRUCTION,
    NO_SOURCE,
    NOT_IN_MASK,
    REASON,
    STUCK,
    THREAD,
    THREADS_AT,
    WAITING,
    WOKEN,
)
from amtcore_interpreter.program import ENDED
from amtcore_interpreter.warp_wide import (
    ACTIVE,
    CLAMP,
    LANE,
    MASK,
    OTHER_RESULT,
    RESULT,
    SHUFFLE_BFLY,
    SHUFFLE_DOWN,
    SHUFFLE_IDX,
    SHUFFLE_UP,
    SOURCE,
    STRAIGHT,
    VOTE_ALL,
    VOTE_ANY,
    VOTE_BALLOT,
    VOTE_UNI,
    WHAT,
)

#: How a warp's turn ended.
RUNNING, FINISHED, STOPPED = range(3)
#: Pieces that a warp may run in its turn.
TURN = 32
_NO_THREAD = 1 << 62


@intrinsic
def _call_piece(typing: Any, function: Any, frame: Any, registers: Any, count: Any) -> Any:
    """Call a compiled piece by its address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word, pointer = ir.IntType(64), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(word, [pointer, pointer, word])
        return builder.call(
            builder.inttoptr(args[0], kind.as_pointer()),
            [*(builder.inttoptr(each, pointer) for each in args[1:3]), args[3]],
        )

    return types.int64(*[types.int64] * 4), codegen


@part
def _next_piece(frame: Any) -> int:
    """The smallest program counter of a thread that is neither ended nor waiting."""
    least = _NO_THREAD
    for thread in range(THREADS):
        counter = frame[COUNTERS + thread]
        if counter < least and counter != ENDED and not frame[WAITING + thread]:
            least = counter
    return least


@part
def _gather(frame: Any, at: int) -> int:
    """List the threads that are at a piece, waiting ones as well; how many they are."""
    count, last = 0, (THREADS - 1 if frame[BACKWARDS] else 0)
    for k in range(THREADS):
        thread = abs(last - k)
        if frame[COUNTERS + thread] == at:
            frame[THREADS_AT + count] = thread
            count += 1
    return count


@part
def _wake(frame: Any) -> bool:
    """Let waiting threads look again who is there; whether there were any."""
    found = False
    for thread in range(THREADS):
        if frame[WAITING + thread] and frame[COUNTERS + thread] != ENDED:
            found = True
        frame[WAITING + thread] = 0
    return found


@part
def _stop(frame: Any, reason: int, thread: int) -> int:
    frame[REASON], frame[THREAD] = reason, thread
    return STOPPED


@part
def _meet(row: Any, frame: Any, words: Any, count: int) -> int:
    """Keep those threads in the list whose whole mask is here; the others wait. How many there are,
    -1 where a thread is not in its own mask."""
    if row[MASK] < 0:
        return count
    here, mask_at, ready = 0, row[MASK] // 4, 0
    for thread in range(THREADS):
        if frame[COUNTERS + thread] == ENDED:
            here |= 1 << thread
    for k in range(count):
        here |= 1 << frame[THREADS_AT + k]
    for k in range(count):
        thread = frame[THREADS_AT + k]
        mask = int(words[mask_at + thread])
        if not (mask >> thread) & 1:
            frame[THREAD] = thread
            return -1
        if mask & ~here:
            frame[WAITING + thread] = 1
        else:
            frame[THREADS_AT + ready] = thread
            ready += 1
    return ready


@part
def _source_lane(what: int, thread: int, lane: int, clamp: int) -> tuple[int, bool]:
    """Whose number a shuffle gives a thread, and whether that is within its segment (PTX ISA,
    `shfl.sync`)."""
    lane, segments, limit = lane & 31, (clamp >> 8) & 31, clamp & 31
    last = (thread & segments) | (limit & ~segments)
    if what == SHUFFLE_UP:
        source = thread - lane
        inside = source >= last
    elif what == SHUFFLE_DOWN:
        source = thread + lane
        inside = source <= last
    elif what == SHUFFLE_BFLY:
        source = thread ^ lane
        inside = source <= last
    else:
        source = (thread & segments) | (lane & ~segments)
        inside = source <= last
    return (source if inside else thread), inside


@part
def _shuffle(row: Any, frame: Any, words: Any, registers: Any, count: int, given: Any) -> int:
    here = 0
    for k in range(count):
        thread = frame[THREADS_AT + k]
        here |= 1 << thread
        given[thread] = words[row[SOURCE] // 4 + thread]
    for k in range(count):
        thread = frame[THREADS_AT + k]
        lane, clamp = words[row[LANE] // 4 + thread], words[row[CLAMP] // 4 + thread]
        source, inside = _source_lane(row[WHAT], thread, int(lane), int(clamp))
        asked = here & int(words[row[MASK] // 4 + thread])
        if not (asked >> source) & 1:
            return _stop(frame, NO_SOURCE, thread)
        if row[RESULT] >= 0:
            words[row[RESULT] // 4 + thread] = given[source]
        if row[OTHER_RESULT] >= 0:
            registers[row[OTHER_RESULT] + thread] = inside
    return RUNNING


@part
def _vote(row: Any, frame: Any, words: Any, registers: Any, count: int) -> int:
    """Each thread asks the threads of its own mask."""
    yes, here = 0, 0
    for k in range(count):
        thread = frame[THREADS_AT + k]
        here |= 1 << thread
        yes |= int(registers[row[SOURCE] + thread] & 1) << thread
    for k in range(count):
        thread = frame[THREADS_AT + k]
        asked = here & int(words[row[MASK] // 4 + thread])
        if row[WHAT] == VOTE_BALLOT:
            words[row[RESULT] // 4 + thread] = yes & asked
            continue
        found = (yes & asked) != 0
        if row[WHAT] == VOTE_ALL:
            found = (yes & asked) == asked
        elif row[WHAT] == VOTE_UNI:
            found = (yes & asked) == asked or not found
        registers[row[RESULT] + thread] = found
    return RUNNING


@part
def _together(row: Any, frame: Any, words: Any, registers: Any, count: int, given: Any) -> int:
    """An instruction of the whole warp, for the threads in the list."""
    status, what = RUNNING, row[WHAT]
    if SHUFFLE_IDX <= what <= SHUFFLE_BFLY:
        status = _shuffle(row, frame, words, registers, count, given)
    elif VOTE_ANY <= what <= VOTE_BALLOT:
        status = _vote(row, frame, words, registers, count)
    elif what == ACTIVE:
        mask = 0
        for k in range(count):
            mask |= 1 << frame[THREADS_AT + k]
        for k in range(count):
            words[row[RESULT] // 4 + frame[THREADS_AT + k]] = mask
    for k in range(count):
        thread = frame[THREADS_AT + k]
        frame[COUNTERS + thread] += 1
        frame[WAITING + thread] = 0
    return status


@part
def _turn(
    pieces: Any, rows: Any, firsts: Any, hits: Any, frame: Any, words: Any, registers: Any,
    given: Any,
) -> int:  # fmt: skip
    """Run up to TURN pieces of one warp."""
    for _ in range(TURN):
        at = _next_piece(frame)
        if at == _NO_THREAD:
            if not _wake(frame):
                return FINISHED
            if frame[WOKEN]:
                return _stop(frame, STUCK, 0)
            frame[WOKEN] = 1
            continue
        count = _gather(frame, at)
        frame[INSTRUCTION] = firsts[at]
        if rows[at, WHAT] == STRAIGHT:
            hits[at] += 1
            if _call_piece(pieces[at], frame.ctypes.data, registers.ctypes.data, count):
                return STOPPED
            frame[WOKEN] = 0
            continue
        count = _meet(rows[at], frame, words, count)
        if count < 0:
            return _stop(frame, NOT_IN_MASK, frame[THREAD])
        if count:
            hits[at] += 1
            frame[WOKEN] = 0
            if _together(rows[at], frame, words, registers, count, given) == STOPPED:
                return STOPPED
    return RUNNING


@kernel
def run_warps(
    pieces: Any, rows: Any, firsts: Any, hits: Any, frames: Any, words: Any, registers: Any,
    given: Any, finished: Any, rounds: int,
) -> int:  # fmt: skip
    """Give every warp `rounds` turns; the warp that stopped, -1 if all have finished and -2 if
    there is more to do.

    Args:
        pieces: Addresses of the pieces' functions.
        rows: What the pieces are: `warp_wide`.
        firsts: Each piece's first instruction.
        hits: How often a warp ran each piece; counted up.
        frames: A row of words per warp: `body`.
        words: `registers` as 32-bit words.
        registers: A row of register memory per warp.
        given: Scratch, one word per thread.
        finished: Whether each warp has.
    """
    for _ in range(rounds):
        left = 0
        for warp in range(frames.shape[0]):
            if not finished[warp]:
                status = _turn(
                    pieces, rows, firsts, hits, frames[warp], words[warp], registers[warp],
                    given,
                )  # fmt: skip
                if status == STOPPED:
                    return warp
                finished[warp] = status == FINISHED
                left += not finished[warp]
        if not left:
            return -1
    return -2

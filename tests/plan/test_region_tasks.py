"""What chunks cost beside the work they share: told by hand."""

from dataclasses import replace

import pytest

from moe_compile.cost.kernel_counts import ORDER_KERNELS
from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork, Room, Work
from moe_compile.cost.tasks import LINK, Priority, Task, run_tasks
from moe_compile.hardware import load_profile
from moe_compile.hardware.products import Product
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.choose_plan import least_us
from moe_compile.plan.region_tasks import Load, price_us, tasks_of
from tests.region_works import mirrored

UNIT = Rates(  # 1 us per 1e6 operations, 1e3 bytes in memory, 1e3 bytes on the link
    matmul_tflops=1.0,
    memory_gb_per_s=1.0,
    op_overhead_us=0.0,
    link_gb_per_s=1.0,
    link_latency_us=0.0,
)
TWO = Candidate(num_chunks=2)


def region(row_bytes=0.0, weight_bytes=0.0, link_us=100.0, experts_us=10.0, **settings):
    """Return rows, dispatch, experts, combine, sum; the exchanges outlast the experts."""
    experts = {"operations": experts_us * 1e6, "weight_bytes": weight_bytes}
    sent = {"link_bytes": link_us * 1e3, "written": row_bytes, "is_chunked": True}
    works = (
        Work(name="rows", nbytes=1e3),
        Work(name="dispatch", needs=(0,), exchange="dispatch", **sent),
        Work(name="experts", needs=(1,), is_chunked=True, **experts),
        Work(name="combine", needs=(2,), exchange="combine", **sent),
        Work(name="sum", needs=(3,), nbytes=1e3),
    )
    return there_and_back(works, row_bytes=row_bytes, **settings)


def there_and_back(works, row_bytes=0.0, **settings):
    return RegionWork(
        forward=works,
        backward=mirrored(works),
        num_ranks=2,
        num_parts=4,
        row_bytes=row_bytes,
        **settings,
    )


@pytest.mark.parametrize(
    ("is_fused", "writes_joined", "num_passes"),
    [(False, False, 1 + 1), (False, True, 1 + 2), (True, False, 0), (True, True, 1)],
)
def test_rows_are_sorted_by_chunk_and_chunks_are_joined_each_way(
    is_fused, writes_joined, num_passes
):
    """Moved once is a read and a write: sorted, and sorted back, as they are joined or after it.

    A reader that sorts them itself, and computes with them, writes them for the backward.
    """

    def priced(row_bytes, candidate):
        works = tuple(
            replace(work, is_fusible=is_fused, fuses_what_it_reads=is_fused)
            for work in region(row_bytes).forward
        )
        sized = there_and_back(works, row_bytes=row_bytes, writes_joined=writes_joined)
        return price_us(sized, candidate, UNIT)

    kept = 5 if is_fused else 0
    assert priced(5e3, TWO) - priced(0.0, TWO) == pytest.approx(2 * 2 * num_passes * 5 + kept)
    assert priced(5e3, Candidate()) == priced(0.0, Candidate())


def test_chunks_that_sums_read_where_they_lie_are_not_joined():
    """Sorted before the first exchange of each way; that of two is all that moves."""

    def priced(row_bytes, candidate):
        works = tuple(replace(work, reads_pieces=True) for work in region(row_bytes).forward)
        return price_us(there_and_back(works, row_bytes=row_bytes), candidate, UNIT)

    assert priced(5e3, TWO) - priced(0.0, TWO) == pytest.approx(2 * 2 * 5)


def test_gradients_of_weights_in_pieces_are_joined():
    """Behind the last exchange nothing hides it: 40 us read and 40 written."""
    work = region(weight_bytes=40e3, link_us=0.0)
    joined = price_us(work, TWO, UNIT) - price_us(work, Candidate(), UNIT)
    assert joined == pytest.approx(80.0)
    unsliced = there_and_back(tuple(replace(w, slices_weights=False) for w in work.forward))
    assert price_us(unsliced, TWO, UNIT) > price_us(unsliced, Candidate(), UNIT)


def test_small_operators_and_launches_take_their_time():
    """Whole: three operators and two launches each way, one after another."""
    slow = replace(UNIT, op_overhead_us=1.0)
    work = region()
    whole = price_us(work, Candidate(), slow) - price_us(work, Candidate(), UNIT)
    assert whole == pytest.approx(2 * 5)
    two = price_us(work, TWO, slow) - price_us(work, TWO, UNIT)
    assert two >= ORDER_KERNELS + 2 * (3 + 2)  # rows, a launch and the sort; then join and sum


@pytest.mark.parametrize(("num", "slots"), [(1, 150), (2, 160)])
def test_buffers_with_room_travel_whole_and_rows_are_moved_into_them_and_out(num, slots):
    """Rows of 100 us on the link of two ranks are 200 us of memory; each move reads and writes."""
    work = region(room=Room(share=1.5, rounded=0.1))
    phases = tasks_of(work, Candidate(num_chunks=num, chunk_by="tokens"), UNIT)
    for tasks in phases:
        assert sum(t.us for t in tasks if t.stream == LINK) == pytest.approx(2 * slots)
        moves = [t.us for t in tasks if t.name in ("fill", "take out")]
        assert sum(moves) == pytest.approx(2 * 2 * (200 + 2 * slots))
        assert not any(t.name == "sort" for t in tasks)
    assert least_us(work, Candidate(num_chunks=num, chunk_by="tokens"), UNIT) >= 4 * slots


def test_padding_is_read_and_written_by_all_work_on_rows_but_products():
    def added_us(work, num=1):
        one = (Work(name="rows"), replace(work, needs=(0,)))
        whole = there_and_back(one)
        padded = replace(whole, room=Room(share=1.5, rounded=0.1))
        candidate = Candidate(num_chunks=num, chunk_by="tokens")
        return price_us(padded, candidate, UNIT) - price_us(whole, candidate, UNIT)

    act = Work(name="act", nbytes=100e3, is_chunked=True)
    assert added_us(act) == pytest.approx(2 * 50)
    assert added_us(act, num=2) == pytest.approx(2 * 60)
    product = Product(rows=16.0, columns=16.0, reduction=16.0)
    assert added_us(replace(act, product=product)) == 0
    assert added_us(replace(act, is_chunked=False)) == 0


def test_the_busiest_rank_sets_the_time_of_the_region():
    work = region()
    busy = replace(work, imbalance=1.5)
    assert price_us(busy, Candidate(), UNIT) == pytest.approx(2 * (1.5 * 210 + 2))
    assert price_us(work, Candidate(), UNIT) == pytest.approx(2 * (210 + 2))


def test_chunks_follow_one_another_where_the_next_collective_comes_first():
    """Longest path first begins the second chunk before the first can leave."""
    tasks = [
        Task(name="a1", stream="compute", us=10.0),
        Task(name="b1", stream="compute", us=10.0),
        Task(name="a2", stream="compute", us=10.0, needs=(0,)),
        Task(name="b2", stream="compute", us=10.0, needs=(1,)),
        Task(name="a leaves", stream=LINK, us=30.0, needs=(2,)),
        Task(name="b leaves", stream=LINK, us=30.0, needs=(3,)),
    ]
    assert run_tasks(tasks, 0.0, 0.0).total_us == 90.0
    assert run_tasks(tasks, 0.0, 0.0, Priority.NEXT_COLLECTIVE).total_us == 80.0


def test_a_price_lets_chunks_follow_one_another():
    """Products of 10, then 30 on the link, per chunk: 20 + 2 x 30 forward, and mirrored."""
    works = (
        Work(name="dispatch", exchange="dispatch", is_chunked=True),
        Work(name="up", needs=(0,), operations=20e6, is_chunked=True),
        Work(name="down", needs=(1,), operations=20e6, is_chunked=True),
        Work(name="combine", needs=(2,), link_bytes=60e3, exchange="combine", is_chunked=True),
    )
    assert price_us(there_and_back(works), TWO, UNIT) == pytest.approx(80 + 80)


def test_chunks_take_as_long_as_their_loads_say():
    work = region(link_us=0.0, experts_us=100.0, weight_bytes=40e3)
    halves = [Load(rows=0.5, sent=0.5, weights=0.5)] * 2
    uneven = [Load(rows=0.25, sent=0.3, weights=0.75), Load(rows=0.85, sent=0.9, weights=0.25)]
    assert tasks_of(work, TWO, UNIT, halves) == tasks_of(work, TWO, UNIT)
    forward, _ = tasks_of(region(), TWO, UNIT, uneven)
    assert [t.us for t in forward if t.stream == LINK] == pytest.approx([30, 90, 30, 90])
    heavy, _ = tasks_of(work, TWO, UNIT, uneven)  # weights of 40 us: 0.75 of them outlast 25 rows
    assert [t.us for t in heavy if t.name == "experts"] == pytest.approx([30, 85])
    (whole, *_), _ = [
        [t.us for t in tasks if t.name == "experts"]
        for tasks in tasks_of(work, Candidate(), UNIT, [Load(rows=1.5, sent=2.0, weights=1.0)])
    ]
    assert whole == pytest.approx(150)


def test_a_chunk_of_experts_has_some_of_the_groups_and_one_of_tokens_some_of_their_rows():
    """Of 128 rows an expert of an H100 makes as much as it can, of 64 rows half of that."""
    product = Product(groups=4, rows=128, columns=2048, reduction=4096, ragged="rows")
    gradient = Product(groups=4, rows=4096, columns=2048, reduction=128, ragged="reduction")
    experts = {"operations": product.operations, "is_chunked": True}
    rates = replace(UNIT, compute=load_profile("h100").compute)

    def slowest(candidate):
        """Return the microseconds of all chunks' products, then of their gradients."""
        works = (
            Work(name="of rows", product=product, **experts),
            Work(name="of weights", product=gradient, makes_gradient=True, **experts),
        )
        phases = tasks_of(there_and_back(works), candidate, rates)
        return [sum(t.us for t in phases[0] if t.name == work.name) for work in works]

    rows, weights = slowest(Candidate())
    share = rates.compute.share_of(product)
    assert rows == pytest.approx(product.operations / 1e6 / share)
    assert slowest(TWO) == pytest.approx([rows, weights])
    by_tokens = slowest(replace(TWO, chunk_by="tokens"))
    halves = rates.compute.share_of(replace(product, rows=64))
    shorter = rates.compute.share_of(replace(gradient, reduction=64))
    of_weights = weights * rates.compute.share_of(gradient) / shorter
    assert by_tokens == pytest.approx([rows * share / halves, of_weights])

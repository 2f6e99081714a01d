"""The least time that any order of a small graph takes, by an exact solver.

The model is that of `moe_compile.schedule.simulate` without slowing: the host, one compute stream,
a link for each group that serves collectives in the order of their launches, launches in the
problem's order. Host and stream may have orders of their own, but for reads: each begins once all
that the host did before is computed.
Times are rounded down, and what lives no longer than nodes without a time take is not counted: no
order is below what the solver proves.
"""

import itertools
import math

from ortools.sat.python import cp_model

STEPS = 20_000
"""Units of time in the sum of all times."""
LARGEST = 1 << 20
"""Units of memory in the allowance."""


def least_step_us(problem, liveness, allowed_bytes, link_factor, limit):
    """Return a time that no order within `allowed_bytes` is below: the least, if proven in time.

    `limit` is in the solver's own time, about seconds of a free core, on a busy machine too.
    """
    everything = sum(nbytes for made in liveness.allocates for _, nbytes in made)
    caps = {everything, min(everything, math.floor(allowed_bytes))}
    return max(_Model(problem, liveness, cap, link_factor).solve(limit) for cap in caps)


class _Model:
    def __init__(self, problem, liveness, allowed_bytes, link_factor):
        self.problem, self.model = problem, cp_model.CpModel()
        times_us = *problem.compute_us, *problem.host_us
        self.unit_us = (sum(times_us) + link_factor * sum(problem.link_us)) / STEPS
        runs = [self._interval(us) for us in problem.compute_us]
        self.begins, self.ends = [b for b, _, _ in runs], [e for _, e, _ in runs]
        self.model.add_no_overlap([run for _, _, run in runs])
        for node, before in enumerate(problem.before):
            for p in before:
                self.model.add(self.begins[node] >= self.ends[p])
        for first, second in itertools.pairwise(problem.launches):
            self.model.add(self.begins[second] >= self.ends[first])
        self._take_host()
        self._serve(link_factor)
        self._hold(liveness, allowed_bytes)

    def _interval(self, us):
        begin, length = self.model.new_int_var(0, STEPS, ""), math.floor(us / self.unit_us)
        return begin, begin + length, self.model.new_fixed_size_interval_var(begin, length, "")

    def _take_host(self):
        problem, model = self.problem, self.model
        done = [self._interval(us) for us in problem.host_us]
        model.add_no_overlap([one for _, _, one in done])
        begins, self.host_ends = [begin for begin, _, _ in done], [end for _, end, _ in done]
        for node, before in enumerate(problem.before):
            model.add(self.begins[node] >= self.host_ends[node])
            for p in before:
                model.add(begins[node] >= self.host_ends[p])
        takes_time = {*problem.awaits, *problem.group_of, *problem.reads}
        takes_time |= {n for n, us in enumerate(problem.compute_us) if us}
        for read in problem.reads:
            for node in takes_time - {read}:
                is_before = model.new_bool_var("")
                model.add(begins[read] >= self.ends[node]).only_enforce_if(is_before)
                is_behind = model.add(begins[node] >= self.host_ends[read])
                is_behind.only_enforce_if(~is_before)

    def _serve(self, link_factor):
        problem = self.problem
        served = {n: self._interval(link_factor * problem.link_us[n]) for n in problem.launches}
        for group in sorted(set(problem.group_of.values())):
            its = [served[n] for n in problem.launches if problem.group_of[n] == group]
            for (_, end, _), (begin, _, _) in itertools.pairwise(its):
                self.model.add(begin >= end)
        for launch, (begin, _, _) in served.items():
            self.model.add(begin >= self.ends[launch])
        for wait, launch in problem.awaits.items():
            if launch is not None:
                self.model.add(self.begins[wait] >= served[launch][1])
        self.served_ends = [end for _, end, _ in served.values()]

    def _hold(self, liveness, allowed_bytes):
        unit, users = max(1.0, allowed_bytes / LARGEST), {}
        for node, storages in enumerate(liveness.uses):
            for storage in storages:
                users.setdefault(storage, []).append(node)
        held, demands = [], []
        for node, (storage, nbytes) in (
            (node, one) for node, made in enumerate(liveness.allocates) for one in made
        ):
            last, length = (self.model.new_int_var(0, STEPS, "") for _ in range(2))
            for user in users[storage]:
                self.model.add(last >= self.ends[user])
            held.append(self.model.new_interval_var(self.begins[node], length, last, ""))
            demands.append(math.floor(nbytes / unit))
        self.model.add_cumulative(held, demands, math.ceil(allowed_bytes / unit))

    def solve(self, limit):
        step = self.model.new_int_var(0, STEPS, "")
        for end in (*self.ends, *self.host_ends, *self.served_ends):
            self.model.add(step >= end)
        self.model.minimize(step)
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time = limit
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        status = solver.solve(self.model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN)
        return solver.best_objective_bound * self.unit_us

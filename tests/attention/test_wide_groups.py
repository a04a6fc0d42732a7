"""More query heads per KV head than the fused kernels take: `auto` gathers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from problem import make_problem

from mlxcel_paged.attention.api import paged_decode
from mlxcel_paged.attention.plan_api import plan_from_csr
from mlxcel_paged.errors import InvalidArgumentError


@pytest.mark.parametrize("group_size", [17, 32])
def test_more_query_heads_than_the_kernel_takes_are_gathered(group_size: int) -> None:
    problem = make_problem(lengths=[70, 9, 0], num_kv_heads=2, group_size=group_size)
    tensors = (problem.q, problem.k_pages, problem.v_pages)
    for chosen in ("auto", "gather", "reference"):
        problem.check(*paged_decode(*tensors, **problem.arguments, backend=chosen, return_lse=True))
    with pytest.raises(InvalidArgumentError, match="at most 16") as caught:
        paged_decode(*tensors, **problem.arguments, backend="cpu")
    assert caught.value.argument == "q"


def test_a_plan_of_more_query_heads_than_the_kernel_takes_gathers() -> None:
    problem = make_problem(lengths=[21, 7], num_kv_heads=2, group_size=20)
    csr = [problem.arguments[name] for name in ("indptr", "indices", "last_page_len")]
    geometry = {"num_pages": problem.k_pages.shape[0], "page_size": 16, "num_qo_heads": 40, "num_kv_heads": 2}
    plan = plan_from_csr(*csr, **geometry, head_dim=64)
    assert plan.backend == "gather"
    problem.check(*plan.run(problem.q, problem.k_pages, problem.v_pages, return_lse=True))
    before = problem.k_pages, problem.v_pages
    plan.advance()
    new = mx.ones((2, 2, 64))
    plan.run(problem.q, *before, k_new=new, v_new=new)
    assert (np.array(problem.k_pages[csr[1][1], 5]) == 1).all()
    with pytest.raises(InvalidArgumentError) as caught:
        plan_from_csr(*csr, **geometry, head_dim=64, backend="cpu")
    assert caught.value.argument == "num_qo_heads"

"""The few sgl_kernel operators that SGLang 0.5.23 calls on a CPU for speculative decoding, in plain torch.

Any other name of the package is a dummy. Signatures are those of the callers in ``sglang.srt.speculative``.
"""

from __future__ import annotations

import sitecustomize
import torch

__version__ = "0.0.0"

#: Called with (target, source) slots when accepted tokens move within the KV pool.
KV_MOVE_HOOKS: list = []


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return globals().setdefault(name, sitecustomize.dummy(name))


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out, pool_len) -> None:
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out[offset : offset + last - first] = req_to_token[row, first:last].to(out.dtype)
        offset += last - first


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out, pool_len, topk, num_steps
) -> None:
    count = topk * num_steps
    flat = out.view(-1)
    for index, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, length : length + count]
        flat[index * count : (index + 1) * count] = slots.to(out.dtype)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride) -> None:
    last = torch.arange(accept_lens.numel()) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.view(-1)[last].to(bonus_tokens.dtype))


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc) -> None:
    accepted = accept_index.view(-1)
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(input_ids, start_loc, lens, topk_index, select_index=None) -> None:
    top = topk_index.view(-1)
    for index, (start, count) in enumerate(zip(start_loc.tolist(), lens.tolist(), strict=True)):
        if count <= 0:
            continue
        input_ids[start : start + count - 1] = input_ids[start + 1 : start + count].clone()
        place = start + count - 1 if select_index is None else int(select_index[index])
        input_ids[place] = top[index]


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, target, source) -> None:
    for hook in KV_MOVE_HOOKS:
        hook(target, source)


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    next_token,
    next_sibling,
    topk,
    depth,
    count,
    mode,
) -> None:
    """The tree of draft tokens: who follows whom, and a mask of each token's ancestors (QLEN_ONLY)."""
    if int(mode) != 1:
        raise NotImplementedError(f"tree mask mode {int(mode)}")
    batch = seq_lens.numel()
    selected = selected_index.view(batch, -1).tolist()
    parents = parent_list.view(batch, -1).tolist() if parent_list.numel() else [[]] * batch
    mask = torch.zeros(batch, count, count, dtype=torch.bool)
    mask[:, :, 0] = True
    place = positions.view(batch, count)
    index = retrieve_index.view(batch, count)
    child, sibling = next_token.view(batch, count), next_sibling.view(batch, count)
    for row, length in enumerate(seq_lens.tolist()):
        parent = _parents(selected[row], parents[row], topk, count)
        place[row, 0] = length
        index[row] = torch.arange(count) + row * count
        for node in range(count - 1, 0, -1):
            if int(child[row, parent[node]]) != -1:
                sibling[row, node] = child[row, parent[node]]
            child[row, parent[node]] = node
        for node in range(1, count):
            steps, ancestor = 0, node
            while ancestor > 0:
                mask[row, node, ancestor] = True
                ancestor = parent[ancestor]
                steps += 1
            place[row, node] = length + steps
    tree_mask.view(-1)[: mask.numel()] = mask.view(-1).to(tree_mask.dtype)


def _parents(selected: list[int], parents: list[int], topk: int, count: int) -> list[int]:
    """The parent of each node; node 0 is the root, the token that is already certain."""
    found = [-1] * count
    for node in range(1, count):
        group = selected[node - 1] // topk
        found[node] = 0 if group == 0 else selected.index(parents[group]) + 1
    return found


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,  # as SGLang spells it
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
) -> None:
    """Walk each tree along the tokens that the target model would have said itself."""
    batch, steps = accept_index.shape
    count = candidates.shape[1]
    target = target_predict.reshape(-1).tolist()
    draft = candidates.tolist()
    index, child, sibling = (
        table.view(batch, count).tolist()
        for table in (retrive_index, retrive_next_token, retrive_next_sibling)
    )
    for row in range(batch):
        last = index[row][0]
        accept_index[row, 0] = last
        accepted = node = 0
        while accepted + 1 < steps:
            node = child[row][node]
            while node != -1 and draft[row][node] != target[last]:
                node = sibling[row][node]
            if node == -1:
                break
            predicts[last] = target[last]
            accepted += 1
            last = index[row][node]
            accept_index[row, accepted] = last
        accept_token_num[row] = accepted
        predicts[last] = target[last]


# Only so that the attention backend "intel_amx" can be built; its kernels are never reached.
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in ("decode_attention_cpu", "extend_attention_cpu"):
    _library.define(_name + "() -> ()")

"""Fully sharded data parallelism: ranks hold shards alone, and blocks are whole while in use.

Read in this order: ``weights`` (flat weights, and the slots of memory in which blocks are whole in
turn), ``blocks`` (the modules that are gathered one after another), ``units`` (what a rank holds,
and the transfers of its gradients) and ``container`` (:class:`parallel.data.FSDP`: when weights are
gathered and gradients reduced). ``meta_device`` is for models that fit no device whole.

ZeRO stage 3 (Rajbhandari et al., 2020); Zhao et al., "PyTorch FSDP" (VLDB 2023).
"""

"""Convert DLIO's arguments to a `Workload` and `Checkpoints`."""

from __future__ import annotations

from typing import Any

from kvio.connectors.dlio.plan import Checkpoints, Workload


def workload_of(args: Any) -> Workload:
    """Return the workload of DLIO's parsed options."""
    return Workload(
        ranks=args.comm_size,
        files=args.num_files_train,
        eval_files=args.num_files_eval,
        samples_per_file=args.num_samples_per_file,
        batch=args.batch_size,
        eval_batch=args.batch_size_eval,
        epochs=args.epochs,
        format=str(args.format),
        generate=bool(args.generate_data),
        train=not args.generate_only,
        evaluate=bool(args.do_eval),
        max_steps=args.total_training_steps if args.total_training_steps > 0 else None,
        eval_after_epoch=args.eval_after_epoch,
        epochs_between_evals=args.epochs_between_evals,
        shuffle=str(args.sample_shuffle) != "off",
        seed=args.seed,
        seed_change_epoch=bool(args.seed_change_epoch),
    )


def checkpoints_of(args: Any, workload: Workload, *, rank: int) -> Checkpoints:
    """Return the checkpoints that DLIO 2.0.0 makes a rank write."""
    return Checkpoints(
        epochs=workload.epochs if args.do_checkpoint and workload.train else 0,
        steps_per_epoch=workload.training.steps,
        after_epoch=args.checkpoint_after_epoch,
        epochs_between=args.epochs_between_checkpoints,
        steps_between=args.steps_between_checkpoints,
        files_each=_files_each(args, rank),
    )


def _files_each(args: Any, rank: int) -> int:
    if str(args.checkpoint_type) == "rank_zero" and rank != 0:
        return 0
    files = int(args.model_size > 0) + int(len(args.optimization_groups) > 0)
    has_layers = any(size > 0 for size in args.layer_parameters) and args.num_layers > 0
    if has_layers and rank % args.pipeline_parallelism == 0:
        files += args.num_layers
        files += args.tensor_parallelism if args.tensor_parallelism > 1 else 0
    return files

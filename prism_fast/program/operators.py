"""The allow-list: every operator a program may hold, by class, with what each class is trusted to do. Needs no torch.

What is not here is refused. Left out on purpose, since they read what is not theirs or was never written, or hide what
they do (each seen by calling it with hostile arguments on the CPU):

- `_reshape_alias` reads beyond the storage; `as_strided` and its kin reach all of it behind a view; `empty`,
  `empty_like`, `new_empty`, `empty_strided` and `resize_` show memory that nobody wrote (the tracer writes zeros).
- `set_`, `from_file`, `data_ptr`-like ones, `hash_tensor`, `storage_offset`, `stride`: addresses and other storages.
- `native_batch_norm` with short statistics, `_weight_norm` with a short scale, `embedding_bag` with offsets that lie,
  `ctc_loss`, packed sequences, `segment_reduce`, `_unsafe_index`: read by lengths that nobody checks.
- Operators of this package and all other custom ones: nothing that logits depend on needs them.
- Random operators: a prediction is a function of text and weights. Backward, sparse, nested, quantised operators, and
  control flow: nothing honest needs them in a forward under no_grad.
- `item`, `is_nonzero`, `equal` and `repeat_interleave` by a tensor: sizes and branches by the *values* of tokens.

Some that honest models need are as bad, and run behind a check of shapes or indices in `runnable` (`guard`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prism_fast.program.format import AUTOCAST, CONSTANT, GETITEM, Argument, Node, Program, ProgramError, Special, shown

# class -> (why it is let in, operators of aten; `default` is the overload of a bare name)
_CLASSES: dict[str, tuple[str, str]] = {
    "pointwise": (
        "each element of the result depends on that element of the inputs, and the result is fresh",
        """
        abs absolute acos acosh addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and.Scalar
        bitwise_and.Scalar_Tensor bitwise_and.Tensor bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor
        bitwise_left_shift.Tensor_Scalar bitwise_not bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_or.Tensor
        bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
        bitwise_xor.Scalar bitwise_xor.Scalar_Tensor bitwise_xor.Tensor ceil celu clamp clamp.Tensor clamp_max
        clamp_max.Tensor clamp_min clamp_min.Tensor clip clip.Tensor complex conj_physical copysign.Scalar
        copysign.Tensor cos cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1 fix float_power.Scalar
        float_power.Tensor_Scalar float_power.Tensor_Tensor floor fmax fmin frac gelu glu hardshrink hardsigmoid
        hardswish hardtanh heaviside hypot i0 ldexp.Tensor leaky_relu lerp.Scalar lerp.Tensor lgamma log log10 log1p
        log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit masked_fill.Scalar
        masked_fill.Tensor maximum minimum mish nan_to_num neg negative polar positive pow.Scalar pow.Tensor_Scalar
        pow.Tensor_Tensor prelu rad2deg reciprocal relu relu6 round round.decimals rsqrt rsub.Scalar rsub.Tensor selu
        sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_erf special_erfc special_exp2
        special_expit special_expm1 special_log1p special_log_ndtr special_ndtr special_xlogy
        special_xlogy.other_scalar special_xlogy.self_scalar sqrt square tan tanh threshold trunc where where.Scalar
        where.ScalarOther where.ScalarSelf where.self xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor
        """,
    ),
    "arithmetic": (
        "as pointwise",
        """
        __and__.Scalar __and__.Tensor __lshift__.Scalar __lshift__.Tensor __or__.Scalar __or__.Tensor
        __rshift__.Scalar __rshift__.Tensor __xor__.Scalar __xor__.Tensor add.Scalar add.Tensor div.Scalar
        div.Scalar_mode div.Tensor div.Tensor_mode divide.Scalar divide.Scalar_mode divide.Tensor divide.Tensor_mode
        floor_divide floor_divide.Scalar fmod.Scalar fmod.Tensor mul.Scalar mul.Tensor multiply.Scalar multiply.Tensor
        remainder.Scalar remainder.Scalar_Tensor remainder.Tensor sub.Scalar sub.Tensor subtract.Scalar
        subtract.Tensor true_divide.Scalar true_divide.Tensor
        """,
    ),
    "comparison": (
        "as pointwise",
        """
        eq.Scalar eq.Tensor ge.Scalar ge.Tensor greater.Scalar greater.Tensor greater_equal.Scalar
        greater_equal.Tensor gt.Scalar gt.Tensor isclose isfinite isin.Scalar_Tensor isin.Tensor_Scalar
        isin.Tensor_Tensor isinf isnan isneginf isposinf le.Scalar le.Tensor less.Scalar less.Tensor
        less_equal.Scalar less_equal.Tensor lt.Scalar lt.Tensor ne.Scalar ne.Tensor not_equal.Scalar not_equal.Tensor
        """,
    ),
    "reduction": (
        "reads whole dimensions of its input, and the result is fresh",
        """
        all all.dim all.dims amax amin aminmax any any.dim any.dims argmax argmin cosine_similarity count_nonzero
        count_nonzero.dim_IntList dist frobenius_norm.dim linalg_matrix_norm linalg_matrix_norm.str_ord linalg_norm
        linalg_norm.ord_str linalg_vector_norm logsumexp max max.dim max.other mean mean.dim median median.dim min
        min.dim min.other nanmean nansum norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype
        prod prod.dim_int special_logsumexp std std.correction std.dim std_mean std_mean.correction std_mean.dim sum
        sum.dim_IntList trace var var.correction var.dim var_mean var_mean.correction var_mean.dim
        """,
    ),
    "cumulative": ("as reduction", "cummax cummin cumprod cumsum diff logcumsumexp"),
    "sorting": (
        "as reduction; the indices it gives lie inside",
        """
        argsort argsort.stable kthvalue mode msort nanmedian nanmedian.dim quantile quantile.scalar sort sort.stable
        topk
        """,
    ),
    "softmax": (
        "as reduction",
        "_log_softmax _softmax log_softmax.int softmax.int special_log_softmax special_softmax",
    ),
    "view": (
        "shows elements of its input under another shape, which torch checks against the input's own",
        """
        _conj _unsafe_view adjoint alias atleast_1d atleast_1d.Sequence atleast_2d atleast_2d.Sequence atleast_3d
        atleast_3d.Sequence broadcast_tensors broadcast_to chunk conj contiguous detach diagonal dsplit.array
        dsplit.int expand expand_as flatten.using_ints hsplit.array hsplit.int imag lift_fresh mH mT matrix_H meshgrid
        meshgrid.indexing moveaxis.int moveaxis.intlist movedim.int movedim.intlist narrow numpy_T permute ravel real
        reshape reshape_as resolve_conj resolve_neg select.int slice.Tensor split.Tensor split.sizes split_with_sizes
        squeeze squeeze.dim squeeze.dims swapaxes swapdims t tensor_split.indices tensor_split.sections transpose.int
        unbind.int unflatten.int unfold unsafe_chunk unsafe_split.Tensor unsafe_split_with_sizes unsqueeze view
        view.dtype view_as view_as_complex view_as_real vsplit.array vsplit.int
        """,
    ),
    "rearrangement": (
        "copies elements of its inputs to other places",
        """
        block_diag cat channel_shuffle clone column_stack concat concatenate constant_pad_nd diag diag_embed diagflat
        diagonal_scatter dstack flip fliplr flipud hstack kron lift_fresh_copy one_hot pad pixel_shuffle
        pixel_unshuffle reflection_pad1d repeat repeat_interleave.self_int replication_pad1d roll rot90 row_stack
        select_scatter slice_scatter stack tile tril triu vstack
        """,
    ),
    "cast": (
        "copies its input to another dtype, on the executor's own device",
        "_to_copy to.device to.dtype to.dtype_layout to.other type_as",
    ),
    "product": (
        "sums of products, shapes checked by torch",
        """
        addbmm addmm addmm.dtype addmv addr baddbmm baddbmm.dtype bilinear bmm bmm.dtype cdist chain_matmul cross dot
        einsum ger inner linalg_cross linalg_matmul linalg_matrix_power linalg_multi_dot linalg_vecdot linear matmul
        matrix_power mm mm.dtype mv outer tensordot vdot
        """,
    ),
    "solve": (
        "dense linear algebra, shapes checked by torch",
        """
        cholesky_solve inverse linalg_cholesky linalg_cholesky_ex linalg_det linalg_inv linalg_inv_ex
        linalg_matrix_exp linalg_qr linalg_solve linalg_solve_ex linalg_solve_triangular matrix_exp triangular_solve
        """,
    ),
    "fourier": (
        "transforms of whole dimensions, for long convolutions",
        """
        fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft
        fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
        """,
    ),
    "convolution": (
        "sums of products over windows, shapes, strides and padding checked by torch",
        """
        adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d conv1d conv1d.padding conv2d conv2d.padding
        conv3d conv3d.padding conv_transpose1d conv_transpose2d.input convolution im2col max_pool1d max_pool2d
        """,
    ),
    "indexing": (
        "reads or writes by index; torch checks each index on the CPU and asserts it on a GPU",
        """
        bucketize.Scalar bucketize.Tensor embedding gather index.Tensor index_add index_copy index_fill.int_Scalar
        index_fill.int_Tensor index_put index_reduce index_select masked_scatter scatter.reduce scatter.src
        scatter.value scatter.value_reduce scatter_add scatter_reduce.two searchsorted.Scalar searchsorted.Tensor take
        take_along_dim
        """,
    ),
    "selection": (
        "the result's size depends on values, and is never more than the input's; honest mixtures need it",
        "_unique2 argwhere masked_select nonzero nonzero_numpy unique_consecutive unique_dim",
    ),
    "creation": (
        "a fresh tensor, every element written",
        """
        arange arange.start arange.start_step eye eye.m fill.Scalar fill.Tensor full full_like linspace logspace
        new_full new_ones new_zeros ones ones_like scalar_tensor tril_indices triu_indices zeros zeros_like
        """,
    ),
    "norm": (
        "as reduction, sizes of weights checked by torch; in evaluation only",
        """
        alpha_dropout batch_norm dropout feature_alpha_dropout feature_dropout group_norm instance_norm layer_norm
        native_layer_norm rms_norm
        """,
    ),
    "attention": ("sums of products, without dropout", "scaled_dot_product_attention"),
    "recurrence": (
        "dense recurrent layers in evaluation; lengths are the input's own",
        "gru.input gru_cell lstm.input lstm_cell rnn_relu.input rnn_relu_cell rnn_tanh.input rnn_tanh_cell",
    ),
    "loss": (
        "models that compute a loss beside their logits; class indices are checked by torch",
        """
        binary_cross_entropy binary_cross_entropy_with_logits cross_entropy_loss huber_loss kl_div l1_loss mse_loss
        nll_loss nll_loss_nd smooth_l1_loss
        """,
    ),
    "in place": (
        "writes into its first argument; whatever of state, constants and tokens that may be is copied before each run",
        """
        __iand__.Scalar __iand__.Tensor __ior__.Scalar __ior__.Tensor __ixor__.Scalar __ixor__.Tensor abs_ add_.Scalar
        add_.Tensor addcdiv_ addcmul_ addmm_ baddbmm_ bitwise_and_.Scalar bitwise_and_.Tensor bitwise_not_
        bitwise_or_.Scalar bitwise_or_.Tensor bitwise_xor_.Scalar bitwise_xor_.Tensor ceil_ celu_ clamp_ clamp_.Tensor
        clamp_max_ clamp_max_.Tensor clamp_min_ clamp_min_.Tensor copy_ cos_ cumprod_ cumsum_ div_.Scalar
        div_.Scalar_mode div_.Tensor div_.Tensor_mode dropout_ elu_ eq_.Scalar eq_.Tensor erf_ exp2_ exp_ expm1_
        fill_.Scalar fill_.Tensor fill_diagonal_ floor_ floor_divide_.Scalar floor_divide_.Tensor fmod_.Scalar
        fmod_.Tensor ge_.Scalar ge_.Tensor gt_.Scalar gt_.Tensor hardsigmoid_ hardswish_ hardtanh_ index_add_
        index_copy_ index_fill_.int_Scalar index_fill_.int_Tensor index_put_ index_reduce_ le_.Scalar le_.Tensor
        leaky_relu_ lerp_.Scalar lerp_.Tensor log1p_ log2_ log_ logical_and_ logical_not_ logical_or_ logical_xor_
        lt_.Scalar lt_.Tensor masked_fill_.Scalar masked_fill_.Tensor masked_scatter_ mish_ mul_.Scalar mul_.Tensor
        nan_to_num_ ne_.Scalar ne_.Tensor neg_ pow_.Scalar pow_.Tensor reciprocal_ relu6_ relu_ remainder_.Scalar
        remainder_.Tensor round_ round_.decimals rsqrt_ scatter_.reduce scatter_.src scatter_.value
        scatter_.value_reduce scatter_add_ scatter_reduce_.two selu_ sigmoid_ sign_ silu_ sin_ sqrt_ square_
        sub_.Scalar sub_.Tensor tan_ tanh_ threshold_ tril_ triu_ trunc_ zero_
        """,
    ),
    "size": ("a size of a tensor, as a number", "sym_numel sym_size.int"),
}
# Arithmetic on sizes, done by functions of `runnable` that keep to 64 bits.
_PYTHON = "add sub mul floordiv mod neg truediv eq ne lt le gt ge max min int float getitem"

Condition = Callable[[Node], str | None]


def _must_be(name: str, position: int, wanted: tuple[Argument, ...], default: Argument, why: str) -> Condition:
    def condition(node: Node) -> str | None:
        found = node.argument(position, name, default)
        if any(type(found) is type(item) and found == item for item in wanted):
            return None
        return f"{name} is {shown(found)}; {why}"

    return condition


def _no_dropout_layers(node: Node) -> str | None:
    # input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
    if node.argument(6, "train", True) is not False:
        return "train is not false: a prediction is made in evaluation mode"
    return None


def _no_boolean_view(node: Node) -> str | None:
    # A bool of another byte than 0 and 1 is counted one way and copied another by torch's kernels.
    found = node.argument(1, "dtype")
    return None if type(found) is Special and found.name != "bool" else "bytes are not shown as bool"


def _known_classes(node: Node) -> str | None:
    found = node.argument(1, "num_classes", -1)
    return None if type(found) is int and found >= 0 else "num_classes is left to the tokens; give it"


def _own_statistics(node: Node) -> str | None:
    if node.argument(5, "use_input_stats") is not True or node.argument(3, "running_mean") is not None:
        return "running statistics are only read by batch_norm"
    return None


_EVALUATION = "a prediction is made in evaluation mode"
_CONDITIONS: dict[str, Condition] = {
    **{
        f"aten.{name}.default": _must_be("train", 2, (False,), True, _EVALUATION)
        for name in ("alpha_dropout", "dropout", "dropout_", "feature_alpha_dropout", "feature_dropout")
    },
    "aten.scaled_dot_product_attention.default": _must_be(
        "dropout_p", 4, (0.0, 0), 0.0, "a prediction is made without dropout"
    ),
    "aten.batch_norm.default": _must_be("training", 5, (False,), True, _EVALUATION),
    "aten.instance_norm.default": _own_statistics,
    "aten.embedding.default": _must_be("sparse", 4, (False,), False, "gradients are nobody's business here"),
    "aten.one_hot.default": _known_classes,
    "aten.view.dtype": _no_boolean_view,
    "aten.searchsorted.Tensor": _must_be("sorter", 9, (None,), None, "an order made elsewhere is not checked"),
    "aten.searchsorted.Scalar": _must_be("sorter", 9, (None,), None, "an order made elsewhere is not checked"),
    **{f"aten.{name}.input": _no_dropout_layers for name in ("gru", "lstm", "rnn_relu", "rnn_tanh")},
}
# Run behind a check of the shapes or indices that torch itself does not make; the reason stands with the check.
GUARDED = frozenset(
    {
        "aten.scaled_dot_product_attention.default",
        *(f"aten.{name}.input" for name in ("gru", "lstm", "rnn_relu", "rnn_tanh")),
    }
)


@dataclass(frozen=True, slots=True)
class Operator:
    """`kind`: its class. `reason`: why that class is let in. `condition`: what is wrong with a node's arguments."""

    kind: str
    reason: str
    condition: Condition | None


def _table() -> dict[str, Operator]:
    table: dict[str, Operator] = {}
    for kind, (reason, names) in _CLASSES.items():
        for name in names.split():
            full = f"aten.{name}" if "." in name else f"aten.{name}.default"
            table[full] = Operator(kind, reason, _CONDITIONS.get(full))
    for name in _PYTHON.split():
        table[f"py.{name}"] = Operator("size", "arithmetic on sizes, in 64 bits", None)
    table[CONSTANT] = Operator("creation", "a constant of the program's own file", None)
    table[AUTOCAST] = Operator("cast", "the executor enters autocast itself, so that its device's lists apply", None)
    return table


OPERATORS: dict[str, Operator] = _table()
assert OPERATORS.keys() >= _CONDITIONS.keys() | GUARDED | {GETITEM}
_LAYOUT = frozenset({"pin_memory", "non_blocking", "out", "generator"})


def why_not(node: Node) -> str | None:
    """Why this node may not run, or None."""
    operator = OPERATORS.get(node.operator)
    if operator is None:
        return f"{shown(node.operator)} is not an operator that a program may hold"
    for name, value in node.keywords:
        if name in _LAYOUT and value not in (None, False):
            return f"{shown(node.operator)}: {name} is not to be given"
    reason = operator.condition(node) if operator.condition is not None else None
    return None if reason is None else f"{shown(node.operator)}: {reason}"


def check(program: Program) -> None:
    """Raises ProgramError, with operator and source line, for the first node that may not run."""
    for node in program.nodes():
        if (reason := why_not(node)) is not None:
            raise ProgramError(f"{reason}{'' if node.where is None else f' ({node.where})'}")

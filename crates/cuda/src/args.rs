//! The arguments of each kernel: mirrors of the structs in `kernels/*/*.cu`, field by field.
//!
//! Owns: these mirrors. Never: computes their values.
//! Invariant: loading a kernel compares the size that the driver reports with the mirror's size.
//! Nothing but the kernels' tests checks the order of fields, so a change of one side must change
//! the other.

use crate::driver::{KernelArgs, TensorMap};
use cleave_engine::ops::SLICES_MAX;

/// An address on the device; 0 stands for none.
pub(crate) type DeviceAddress = u64;

macro_rules! args {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $type,)* }

        // SAFETY: `repr(C)`, numbers and addresses, mirrors the kernel's struct.
        unsafe impl KernelArgs for $name {}
    )*};
}

args! {
    /// Arguments of the kernels in `kernels/embed`.
    EmbedArgs {
        table: DeviceAddress,
        tokens: DeviceAddress,
        drawn: DeviceAddress,
        out: DeviceAddress,
        width: u32,
        vocab: u32,
        factor: f32,
        padding: u32,
    }
    /// Arguments of `norm_*` in `kernels/norm`.
    NormArgs {
        residual: DeviceAddress,
        delta: DeviceAddress,
        weight: DeviceAddress,
        out: DeviceAddress,
        width: u32,
        epsilon: f32,
        formula: u32,
        padding: u32,
    }
    /// Arguments of `add_rows_*` in `kernels/norm`.
    AddRowsArgs {
        delta: DeviceAddress,
        residual: DeviceAddress,
        width: u32,
        padding: u32,
    }
    /// Arguments of `norm_add_*` in `kernels/norm`.
    NormAddArgs {
        x: DeviceAddress,
        residual: DeviceAddress,
        weight: DeviceAddress,
        width: u32,
        epsilon: f32,
    }
    /// Arguments of `round_rows_*` in `kernels/norm`.
    RoundArgs {
        from: DeviceAddress,
        to: DeviceAddress,
        width: u32,
        padding: u32,
    }
    /// Arguments of `projection_norm_*` in `kernels/norm`.
    ProjectionNormArgs {
        qkv: DeviceAddress,
        query_weight: DeviceAddress,
        key_weight: DeviceAddress,
        query_width: u32,
        key_width: u32,
        epsilon: f32,
        padding: u32,
    }
    /// Arguments of `head_norm_*` in `kernels/norm`.
    HeadNormArgs {
        qkv: DeviceAddress,
        query_weight: DeviceAddress,
        key_weight: DeviceAddress,
        query_heads: u32,
        kv_heads: u32,
        head_dim: u32,
        epsilon: f32,
    }
    /// Arguments of the kernels in `kernels/rotate`.
    RotateArgs {
        qkv: DeviceAddress,
        cos: DeviceAddress,
        sin: DeviceAddress,
        query_factors: DeviceAddress,
        positions: DeviceAddress,
        row_slots: DeviceAddress,
        pool: DeviceAddress,
        block_elements: u64,
        key_offset: u64,
        value_offset: u64,
        query_heads: u32,
        kv_heads: u32,
        head_dim: u32,
        half: u32,
        block_tokens: u32,
        // Named padding makes the size a multiple of eight bytes, so that no byte is uninitialised
        // when it is copied.
        padding: u32,
    }
    /// Arguments of the kernels in `kernels/gate`.
    GateArgs {
        gate_up: DeviceAddress,
        out: DeviceAddress,
        width: u32,
        activation: u32,
        limit: f32,
        padding: u32,
    }
    /// Arguments of the kernels in `kernels/gather`.
    GatherArgs {
        from: DeviceAddress,
        to: DeviceAddress,
        indices: DeviceAddress,
        units: u32,
        padding: u32,
    }
    /// Arguments of the tensor-core kernels of `kernels/attend`.
    AttendArgs {
        qkv: DeviceAddress,
        out: DeviceAddress,
        pool: DeviceAddress,
        tables: DeviceAddress,
        segments: DeviceAddress,
        items: DeviceAddress,
        items_count: DeviceAddress,
        states: DeviceAddress,
        arrivals: DeviceAddress,
        sinks: DeviceAddress,
        block_bytes: u64,
        key_bytes: u64,
        value_bytes: u64,
        query_heads: u32,
        kv_heads: u32,
        block_shift: u32,
        window: u32,
        scale: f32,
        value_scale: f32,
        cap: f32,
        cap_exponent: f32,
    }
    /// Arguments of the plain kernels of `kernels/attend`.
    AttendPlainArgs {
        qkv: DeviceAddress,
        out: DeviceAddress,
        pool: DeviceAddress,
        tables: DeviceAddress,
        segments: DeviceAddress,
        segments_count: DeviceAddress,
        sinks: DeviceAddress,
        block_elements: u64,
        key_elements: u64,
        value_elements: u64,
        query_heads: u32,
        kv_heads: u32,
        head_dim: u32,
        block_tokens: u32,
        window: u32,
        scale: f32,
        cap: f32,
        cap_exponent: f32,
    }
    /// Arguments of the tensor-core kernels of `kernels/matmul`.
    MatmulArgs {
        weights: DeviceAddress,
        column_scales: DeviceAddress,
        group_scales: DeviceAddress,
        x: DeviceAddress,
        bias: DeviceAddress,
        out: DeviceAddress,
        rows_count: DeviceAddress,
        sums: DeviceAddress,
        columns: u32,
        width: u32,
        span_width: u32,
        group_shift: u32,
        is_out_f32: u32,
        slices: u32,
        slice_ends: [u32; SLICES_MAX],
    }
    /// Arguments of the kernels in `kernels/matmul/cluster.cu`.
    MatmulClusterArgs {
        weights: TensorMap,
        x: TensorMap,
        product: MatmulArgs,
        padding: [u32; 34],
    }
    /// Arguments of the plain kernels of `kernels/matmul`.
    MatmulPlainArgs {
        weights: DeviceAddress,
        x: DeviceAddress,
        bias: DeviceAddress,
        out: DeviceAddress,
        rows_count: DeviceAddress,
        columns: u32,
        width: u32,
        is_out_f32: u32,
        slices: u32,
        slice_ends: [u32; SLICES_MAX],
    }
    /// Mirrors `ExpertRows` of the kernels.
    ExpertRowsArgs {
        tiles: DeviceAddress,
        tiles_count: DeviceAddress,
        rows_of: DeviceAddress,
        stride: u64,
    }
    /// Arguments of the tensor-core kernels for experts' products.
    ExpertMatmulArgs {
        product: MatmulArgs,
        rows: ExpertRowsArgs,
    }
    /// Arguments of the plain kernels for experts' products.
    ExpertMatmulPlainArgs {
        product: MatmulPlainArgs,
        rows: ExpertRowsArgs,
    }
    /// Mirrors `ExpertPiece` of the kernels.
    ExpertPieceArgs {
        rows_count: DeviceAddress,
        first: u32,
        most: u32,
    }
    /// Arguments of `experts_logits_*` in `kernels/experts`.
    ExpertLogitsArgs {
        x: DeviceAddress,
        weights: DeviceAddress,
        bias: DeviceAddress,
        logits: DeviceAddress,
        piece: ExpertPieceArgs,
        columns: u32,
        width: u32,
        is_tiled: u32,
        padding: u32,
    }
    /// Arguments of `experts_route` in `kernels/experts`.
    RouteArgs {
        logits: DeviceAddress,
        choice_bias: DeviceAddress,
        experts: DeviceAddress,
        weights: DeviceAddress,
        shared_weights: DeviceAddress,
        masks: DeviceAddress,
        piece: ExpertPieceArgs,
        columns: u32,
        count: u32,
        chosen: u32,
        words: u32,
        score: u32,
        rule: u32,
        groups: u32,
        groups_chosen: u32,
        is_two_best: u32,
        epsilon: f32,
        scale: f32,
        padding: u32,
    }
    /// Arguments of `experts_sort` in `kernels/experts`.
    ExpertSortArgs {
        masks: DeviceAddress,
        experts: DeviceAddress,
        places: DeviceAddress,
        rows_of: DeviceAddress,
        tiles: DeviceAddress,
        tiles_count: DeviceAddress,
        first_row: u32,
        count: u32,
        chosen: u32,
        words: u32,
        tile_rows: u32,
        padding: u32,
    }
    /// Arguments of `experts_combine_*` in `kernels/experts`.
    CombineArgs {
        outputs: DeviceAddress,
        places: DeviceAddress,
        weights: DeviceAddress,
        shared: DeviceAddress,
        shared_weights: DeviceAddress,
        out: DeviceAddress,
        piece: ExpertPieceArgs,
        chosen: u32,
        width: u32,
    }
    /// Arguments of `adapt_shrink_*` in `kernels/adapt`.
    ShrinkArgs {
        x: DeviceAddress,
        shrunk: DeviceAddress,
        rows: AdapterRowsArgs,
        width: u32,
        is_tiled: u32,
    }
    /// Arguments of `adapt_expand_*` in `kernels/adapt`.
    ExpandArgs {
        shrunk: DeviceAddress,
        out: DeviceAddress,
        rows: AdapterRowsArgs,
        width: u32,
        padding: u32,
    }
    /// Arguments of all kernels of `kernels/blocks`.
    BlocksArgs {
        pool: DeviceAddress,
        staging: DeviceAddress,
        pieces: DeviceAddress,
        checksums: DeviceAddress,
        secret: DeviceAddress,
    }
    /// Arguments of `cap_logits` in `kernels/sample`.
    CapArgs {
        logits: DeviceAddress,
        count: u64,
        limit: f32,
        exponent: f32,
    }
    /// Arguments of the kernels in `kernels/sample/sample.cu`.
    SampleArgs {
        logits: DeviceAddress,
        rules: DeviceAddress,
        edits: DeviceAddress,
        masks: DeviceAddress,
        best: DeviceAddress,
        segments: DeviceAddress,
        tokens: DeviceAddress,
        vocab: u32,
        padding: u32,
    }
}

/// Returns the ends of slices as kernels take them; kernels read no more than there are.
pub(crate) fn slice_ends(ends: impl Iterator<Item = usize>) -> [u32; SLICES_MAX] {
    let mut all = [0; SLICES_MAX];
    for (to, end) in all.iter_mut().zip(ends) {
        *to = end as u32;
    }
    all
}

/// Mirrors `Piece` of `kernels/blocks`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DevicePiece {
    pub(crate) pool: u64,
    pub(crate) staging: u64,
    pub(crate) bytes: u64,
}

/// Mirrors `AdapterRows` of `kernels/adapt`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AdapterRowsArgs {
    pub(crate) places: DeviceAddress,
    pub(crate) tiles: DeviceAddress,
    pub(crate) counts: DeviceAddress,
    pub(crate) product: u32,
    pub(crate) ranks_most: u32,
}

/// Mirrors `AdapterPlace` of `kernels/adapt`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DevicePlace {
    pub(crate) changes: u64,
    pub(crate) row: u32,
    pub(crate) padding: u32,
}

/// Mirrors `AdapterTile` of `kernels/adapt`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DeviceTile {
    pub(crate) first: u32,
    pub(crate) end: u32,
}

/// Mirrors `DrawRule` of `kernels/sample`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DeviceRule {
    pub(crate) bits: u64,
    pub(crate) top_p: u64,
    pub(crate) inverse_temperature: f32,
    pub(crate) min_p: f32,
    pub(crate) top_k: u32,
    pub(crate) edits_first: u32,
    pub(crate) edits_count: u32,
    pub(crate) top_n_sigma: f32,
    pub(crate) row: u32,
    pub(crate) mask: u32,
}

/// Mirrors `LogitEdit` of `kernels/sample`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DeviceEdit {
    pub(crate) token: u32,
    pub(crate) kind: u32,
    pub(crate) value: f32,
    pub(crate) frequency: f32,
    pub(crate) presence: f32,
}

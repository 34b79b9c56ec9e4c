//! What each kernel is given: the structs of `kernels/*/*.cu`, field by field.
//!
//! Owns: these mirrors. Never: computes them.
//! Invariant: when a kernel is loaded the driver says how many bytes it takes, and that is compared; field
//! order is kept by whoever changes either side, and by the kernels' tests.

use crate::driver::KernelArgs;

/// Address of something on the device; 0 is none.
pub(crate) type Address = u64;

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
    /// `kernels/embed`.
    EmbedArgs {
        table: Address,
        tokens: Address,
        drawn: Address,
        out: Address,
        width: u32,
        vocab: u32,
    }
    /// `kernels/norm`: `norm_*`.
    NormArgs {
        residual: Address,
        delta: Address,
        weight: Address,
        out: Address,
        width: u32,
        epsilon: f32,
    }
    /// `kernels/norm`: `head_norm_*`.
    HeadNormArgs {
        qkv: Address,
        query_weight: Address,
        key_weight: Address,
        query_heads: u32,
        kv_heads: u32,
        head_dim: u32,
        epsilon: f32,
    }
    /// `kernels/rotate`.
    RotateArgs {
        qkv: Address,
        cos: Address,
        sin: Address,
        positions: Address,
        row_slots: Address,
        pool: Address,
        block_elements: u64,
        key_offset: u64,
        value_offset: u64,
        query_heads: u32,
        kv_heads: u32,
        head_dim: u32,
        block_tokens: u32,
    }
    /// `kernels/gate`.
    GateArgs {
        gate_up: Address,
        out: Address,
        width: u32,
        // The struct ends on eight bytes, and no byte of it may be unknown.
        padding: u32,
    }
    /// `kernels/gather`.
    GatherArgs {
        from: Address,
        to: Address,
        indices: Address,
        units: u32,
        padding: u32,
    }
    /// `kernels/attend`: the tensor-core kernels.
    AttendArgs {
        qkv: Address,
        out: Address,
        pool: Address,
        tables: Address,
        segments: Address,
        items: Address,
        items_count: Address,
        states: Address,
        arrivals: Address,
        block_bytes: u64,
        key_bytes: u64,
        value_bytes: u64,
        query_heads: u32,
        kv_heads: u32,
        block_shift: u32,
        window: u32,
        scale: f32,
        value_scale: f32,
    }
    /// `kernels/attend`: the plain kernels.
    AttendPlainArgs {
        qkv: Address,
        out: Address,
        pool: Address,
        tables: Address,
        segments: Address,
        segments_count: Address,
        block_elements: u64,
        key_elements: u64,
        value_elements: u64,
        query_heads: u32,
        kv_heads: u32,
        head_dim: u32,
        block_tokens: u32,
        window: u32,
        scale: f32,
    }
    /// `kernels/matmul`: the tensor-core kernels.
    MatmulArgs {
        weights: Address,
        column_scales: Address,
        group_scales: Address,
        x: Address,
        bias: Address,
        out: Address,
        rows_count: Address,
        sums: Address,
        arrivals: Address,
        columns: u32,
        width: u32,
        span_width: u32,
        spans: u32,
        group_shift: u32,
        is_out_f32: u32,
    }
    /// `kernels/matmul`: the plain kernels.
    MatmulPlainArgs {
        weights: Address,
        x: Address,
        bias: Address,
        out: Address,
        rows_count: Address,
        columns: u32,
        width: u32,
        is_out_f32: u32,
        padding: u32,
    }
    /// `kernels/blocks`: all kernels.
    BlocksArgs {
        pool: Address,
        staging: Address,
        pieces: Address,
        checksums: Address,
        secret: Address,
    }
    /// `kernels/sample`: both kernels.
    SampleArgs {
        logits: Address,
        rules: Address,
        edits: Address,
        best: Address,
        tokens: Address,
        vocab: u32,
        padding: u32,
    }
}

/// `Piece` of `kernels/blocks`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DevicePiece {
    pub(crate) pool: u64,
    pub(crate) staging: u64,
    pub(crate) bytes: u64,
}

/// `DrawRule` of `kernels/sample`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DeviceRule {
    pub(crate) bits: u64,
    pub(crate) top_p: u64,
    pub(crate) heat: f32,
    pub(crate) min_p: f32,
    pub(crate) top_k: u32,
    pub(crate) edits_first: u32,
    pub(crate) edits_count: u32,
    pub(crate) padding: u32,
}

/// `Edit` of `kernels/sample`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DeviceEdit {
    pub(crate) token: u32,
    pub(crate) kind: u32,
    pub(crate) value: f32,
    pub(crate) frequency: f32,
    pub(crate) presence: f32,
}

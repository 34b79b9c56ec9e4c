//! Norms on a GPU, and the rounding that a part without one needs.
//!
//! Owns: the launches, and the choice of query and key elements that are normalised together.
//! Never: multiplies.
//! Invariant: weights of one head's width are for single heads, others for a whole projection; a
//! projection of one head is both.

use super::{CudaOps, HEAD_WARPS};
use crate::args::{
    AddRowsArgs, HeadNormArgs, NormAddArgs, NormArgs, ProjectionNormArgs, RoundArgs,
};
use crate::buffers::CudaRows;
use crate::pack::CudaVector;
use cleave_engine::EngineError;
use cleave_engine::ops::{HeadShape, Norm, NormFormula, Precision, QkNorms};

impl CudaOps {
    /// Adds `delta` to the residual stream if there is one, and normalises it.
    pub(super) fn launch_norm(
        &self,
        norm: &Norm<'_, CudaVector>,
        rows: usize,
        residual: &CudaRows,
        delta: Option<&CudaRows>,
        out: &CudaRows,
    ) -> Result<(), EngineError> {
        let rows = self.launched(rows);
        let width = residual.width;
        assert_eq!((norm.weight.width, out.width), (width, width));
        assert_eq!(residual.stored, Precision::F32, "a residual stream");
        assert_eq!(out.stored, self.options.precision);
        residual.check_rows(rows);
        out.check_rows(rows);
        if let Some(delta) = delta {
            assert_eq!((delta.width, delta.stored), (width, self.options.precision));
            delta.check_rows(rows);
        }
        let args = NormArgs {
            residual: residual.address(),
            delta: delta.map_or(0, CudaRows::address),
            weight: norm.weight.values.address(),
            out: out.address(),
            width: width as u32,
            epsilon: norm.epsilon,
            formula: match norm.formula {
                NormFormula::RmsNorm => 0,
                NormFormula::LayerNorm => 1,
            },
            padding: 0,
        };
        // SAFETY: the rows are within the buffers, as checked above, which outlive the stream's
        // work.
        unsafe {
            self.kernels
                .norm
                .launch(&self.stream, [rows as u32, 1, 1], args)
        }?;
        Ok(())
    }

    /// Adds the normalised `x` to the residual stream.
    pub(super) fn add_normed(
        &self,
        norm: &Norm<'_, CudaVector>,
        rows: usize,
        x: &CudaRows,
        residual: &CudaRows,
    ) -> Result<(), EngineError> {
        let rows = self.launched(rows);
        let width = residual.width;
        assert_eq!((norm.weight.width, x.width), (width, width));
        assert_eq!(norm.formula, NormFormula::RmsNorm);
        assert_eq!(residual.stored, Precision::F32, "a residual stream");
        assert_eq!(x.stored, self.options.precision);
        residual.check_rows(rows);
        x.check_rows(rows);
        let args = NormAddArgs {
            x: x.address(),
            residual: residual.address(),
            weight: norm.weight.values.address(),
            width: width as u32,
            epsilon: norm.epsilon,
        };
        let grid = [rows as u32, 1, 1];
        // SAFETY: as in `launch_norm`.
        unsafe { self.kernels.norm_add.launch(&self.stream, grid, args) }?;
        Ok(())
    }

    /// Adds `delta` to the residual stream.
    pub(super) fn launch_add(
        &self,
        rows: usize,
        delta: &CudaRows,
        residual: &CudaRows,
    ) -> Result<(), EngineError> {
        let rows = self.launched(rows);
        let width = residual.width;
        assert_eq!(residual.stored, Precision::F32, "a residual stream");
        assert_eq!((delta.width, delta.stored), (width, self.options.precision));
        residual.check_rows(rows);
        delta.check_rows(rows);
        let args = AddRowsArgs {
            delta: delta.address(),
            residual: residual.address(),
            width: width as u32,
            padding: 0,
        };
        let grid = [rows as u32, 1, 1];
        // SAFETY: as in `launch_norm`.
        unsafe { self.kernels.add_rows.launch(&self.stream, grid, args) }?;
        Ok(())
    }

    /// Rounds the residual stream into `scratch` if activations have another type than its own.
    pub(super) fn round_rows<'a>(
        &self,
        rows: usize,
        residual: &'a CudaRows,
        scratch: &'a CudaRows,
    ) -> Result<&'a CudaRows, EngineError> {
        let Some(kernel) = &self.kernels.round_rows else {
            return Ok(residual);
        };
        let rows = self.launched(rows);
        assert_eq!(residual.stored, Precision::F32, "a residual stream");
        assert_eq!(
            (scratch.width, scratch.stored),
            (residual.width, self.options.precision)
        );
        residual.check_rows(rows);
        scratch.check_rows(rows);
        let args = RoundArgs {
            from: residual.address(),
            to: scratch.address(),
            width: residual.width as u32,
            padding: 0,
        };
        // SAFETY: as in `launch_norm`.
        unsafe { kernel.launch(&self.stream, [rows as u32, 1, 1], args) }?;
        Ok(scratch)
    }

    /// Normalises queries and keys in place.
    pub(super) fn norm_queries_and_keys(
        &self,
        norms: &QkNorms<'_, CudaVector>,
        heads: HeadShape,
        rows: usize,
        qkv: &CudaRows,
    ) -> Result<(), EngineError> {
        assert_eq!(
            (qkv.width, qkv.stored),
            (heads.qkv_width(), self.options.precision)
        );
        let rows = self.launched(rows);
        qkv.check_rows(rows);
        if norms.query.width == heads.head_dim && norms.key.width == heads.head_dim {
            self.norm_heads(norms, heads, rows, qkv)
        } else {
            self.norm_projections(norms, heads, rows, qkv)
        }
    }

    /// Normalises each query and key head of `rows` rows.
    fn norm_heads(
        &self,
        norms: &QkNorms<'_, CudaVector>,
        heads: HeadShape,
        rows: usize,
        qkv: &CudaRows,
    ) -> Result<(), EngineError> {
        let args = HeadNormArgs {
            qkv: qkv.address(),
            query_weight: norms.query.values.address(),
            key_weight: norms.key.values.address(),
            query_heads: heads.query_heads as u32,
            kv_heads: heads.kv_heads as u32,
            head_dim: heads.head_dim as u32,
            epsilon: norms.epsilon,
        };
        let blocks = (heads.query_heads + heads.kv_heads).div_ceil(HEAD_WARPS);
        let grid = [rows as u32, blocks as u32, 1];
        // SAFETY: the rows are within the buffer, which outlives the stream's work; each weight is
        // as wide as a head.
        unsafe { self.kernels.head_norm.launch(&self.stream, grid, args) }?;
        Ok(())
    }

    /// Normalises all query heads of a row together, and all key heads.
    fn norm_projections(
        &self,
        norms: &QkNorms<'_, CudaVector>,
        heads: HeadShape,
        rows: usize,
        qkv: &CudaRows,
    ) -> Result<(), EngineError> {
        let (query_width, key_width) = (heads.query_width(), heads.kv_heads * heads.head_dim);
        assert_eq!(
            (norms.query.width, norms.key.width),
            (query_width, key_width)
        );
        let args = ProjectionNormArgs {
            qkv: qkv.address(),
            query_weight: norms.query.values.address(),
            key_weight: norms.key.values.address(),
            query_width: query_width as u32,
            key_width: key_width as u32,
            epsilon: norms.epsilon,
            padding: 0,
        };
        let kernel = &self.kernels.projection_norm;
        // SAFETY: as in `norm_heads`; each weight is as wide as its projection.
        unsafe { kernel.launch(&self.stream, [rows as u32, 2, 1], args) }?;
        Ok(())
    }
}

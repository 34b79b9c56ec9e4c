//! Matrix products by NVIDIA's cublasLt, where the options ask for them and the library is
//! installed.
//!
//! Owns: the library's handle, its workspace, and the algorithm chosen for each shape.
//! Never: promises equal bits for different numbers of rows, because the algorithm depends on that
//! number. An engine with cublasLt gives up path independence, and its fingerprint says so.
//! Invariant: the library is asked for an algorithm once for each shape; later products of that
//! shape allocate nothing.

use crate::driver::{CudaStream, DeviceMemory};
use crate::error::CudaError;
use crate::matmul::{MatmulProduct, MatmulTarget};
use cleave_engine::ops::Precision;
use cudarc::cublaslt::sys as lt;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;

/// The workspace that NVIDIA's guide recommends on Hopper; a smaller one excludes some algorithms.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The library's state for one device.
#[derive(Debug)]
pub(crate) struct CublasLt {
    handle: lt::cublasLtHandle_t,
    workspace: DeviceMemory,
    chosen: BTreeMap<MatmulShape, ChosenAlgorithm>,
}

// SAFETY: the library may be called from any thread, one at a time for a handle's descriptors.
unsafe impl Send for CublasLt {}

/// The key of an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct MatmulShape {
    rows: usize,
    columns: usize,
    width: usize,
    is_out_f32: bool,
}

#[derive(Debug)]
struct ChosenAlgorithm {
    operation: MatmulDescriptor,
    weights: MatrixLayout,
    x: MatrixLayout,
    out: MatrixLayout,
    algorithm: lt::cublasLtMatmulAlgo_t,
}

/// The description of an operation; dropping it destroys it.
#[derive(Debug)]
struct MatmulDescriptor(lt::cublasLtMatmulDesc_t);

/// The description of a matrix; dropping it destroys it.
#[derive(Debug)]
struct MatrixLayout(lt::cublasLtMatrixLayout_t);

/// Calls the library, whose presence `CublasLt::new` checked; every object that it is given is
/// alive.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        let status = crate::dynamic::call_raw!(lt::culib, lt::$function($($argument),*));
        check(status, stringify!($function))
    }};
}

fn check(status: Option<c_int>, call: &'static str) -> Result<(), CudaError> {
    if status == Some(0) {
        return Ok(());
    }
    let text = match status {
        Some(status) => describe(status, "cublasLtGetStatusString").unwrap_or_default(),
        None => "this cublasLt lacks the function: install CUDA 13's".to_owned(),
    };
    let name = status.and_then(|status| describe(status, "cublasLtGetStatusName"));
    Err(CudaError::Call {
        call,
        name: name.unwrap_or_else(|| format!("status {status:?}")),
        text,
        // The library cannot tell whether the device failed; the driver's next call reports that.
        is_device_lost: false,
    })
}

/// Returns the library's description of a status.
fn describe(status: c_int, function: &str) -> Option<String> {
    type DescribeCublasFn = unsafe extern "C" fn(c_int) -> *const c_char;
    // SAFETY: the function is of that type, and gives a static string for every number.
    unsafe {
        let found = lt::culib()
            .get::<DescribeCublasFn>(function.as_bytes())
            .ok()?;
        let text = found(status);
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}

impl CublasLt {
    /// Opens the library.
    ///
    /// # Errors
    /// If it is not installed, or has no memory.
    pub(crate) fn new(stream: &CudaStream) -> Result<Self, CudaError> {
        // SAFETY: looks for the library, and calls nothing of it.
        if !unsafe { lt::is_culib_present() } {
            return Err(CudaError::NoKernels(
                "--gpu-matmul fast needs cublasLt (libcublasLt.so.13), which is not installed; put its folder into \
                 LD_LIBRARY_PATH, or leave the flag out"
                    .to_owned(),
            ));
        }
        let workspace = DeviceMemory::new(stream.device(), WORKSPACE_BYTES, "cublasLt")?;
        let mut handle = std::ptr::null_mut();
        call!(cublasLtCreate(&raw mut handle))?;
        Ok(Self {
            handle,
            workspace,
            chosen: BTreeMap::new(),
        })
    }

    /// Computes `out = x · matrix`, bf16 in, f32 sums. The library's matrices are column-major, so
    /// it is asked for the transposed product: weights times rows.
    pub(crate) fn run(
        &mut self,
        stream: &CudaStream,
        product: &MatmulProduct<'_>,
        target: MatmulTarget,
    ) -> Result<(), CudaError> {
        let MatmulProduct {
            matrix,
            rows: _,
            bucket: rows,
            x,
        } = *product;
        let shape = MatmulShape {
            rows,
            columns: matrix.columns,
            width: matrix.width,
            is_out_f32: target.stored == Precision::F32,
        };
        if !self.chosen.contains_key(&shape) {
            let chosen = self.choose(shape)?;
            self.chosen.insert(shape, chosen);
        }
        let chosen = &self.chosen[&shape];
        let (one, zero) = (1.0f32, 0.0f32);
        let out = target.address as *mut c_void;
        call!(cublasLtMatmul(
            self.handle,
            chosen.operation.0,
            (&raw const one).cast(),
            matrix.weight.address() as *const c_void,
            chosen.weights.0,
            x.address as *const c_void,
            chosen.x.0,
            (&raw const zero).cast(),
            out,
            chosen.out.0,
            out,
            chosen.out.0,
            &raw const chosen.algorithm,
            self.workspace.at(0) as *mut c_void,
            WORKSPACE_BYTES,
            stream.handle().cast(),
        ))
    }

    // Asks the library for the algorithm of a shape; `run` keeps it.
    fn choose(&self, shape: MatmulShape) -> Result<ChosenAlgorithm, CudaError> {
        let MatmulShape {
            rows,
            columns,
            width,
            is_out_f32,
        } = shape;
        let bf16 = lt::cudaDataType_t::CUDA_R_16BF;
        let out_type = if is_out_f32 {
            lt::cudaDataType_t::CUDA_R_32F
        } else {
            bf16
        };
        let operation = MatmulDescriptor::new()?;
        let weights = MatrixLayout::new(bf16, width, columns)?;
        let x = MatrixLayout::new(bf16, width, rows)?;
        let out = MatrixLayout::new(out_type, columns, rows)?;
        let mut preference = std::ptr::null_mut();
        call!(cublasLtMatmulPreferenceCreate(&raw mut preference))?;
        let most = WORKSPACE_BYTES as u64;
        let limit_set = call!(cublasLtMatmulPreferenceSetAttribute(
            preference,
            lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&raw const most).cast(),
            size_of::<u64>(),
        ));
        // The result's status may be a number that the binding's enum does not list, so the code
        // reads the algorithm alone and never the whole struct.
        let mut found = MaybeUninit::<lt::cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut count = 0;
        let queried = limit_set.and_then(|()| {
            call!(cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                operation.0,
                weights.0,
                x.0,
                out.0,
                out.0,
                preference,
                1,
                found.as_mut_ptr(),
                &raw mut count,
            ))
        });
        // The preference is destroyed before an error returns, so that none leaks.
        let _ = call!(cublasLtMatmulPreferenceDestroy(preference));
        queried?;
        if count == 0 {
            return Err(CudaError::NoKernels(format!(
                "cublasLt has no algorithm for {rows} rows times ({columns}, {width}); leave --gpu-matmul fast out"
            )));
        }
        Ok(ChosenAlgorithm {
            operation,
            weights,
            x,
            out,
            // SAFETY: the library filled it in, and any bits make an algorithm.
            algorithm: unsafe { (&raw const (*found.as_ptr()).algo).read() },
        })
    }
}

impl MatmulDescriptor {
    /// Describes a product with f32 sums whose first matrix is transposed.
    fn new() -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        call!(cublasLtMatmulDescCreate(
            &raw mut handle,
            lt::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            lt::cudaDataType_t::CUDA_R_32F,
        ))?;
        let made = Self(handle);
        // CUBLAS_OP_T.
        let transposed = 1i32;
        call!(cublasLtMatmulDescSetAttribute(
            made.0,
            lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
            (&raw const transposed).cast(),
            size_of::<i32>(),
        ))?;
        Ok(made)
    }
}

impl Drop for MatmulDescriptor {
    fn drop(&mut self) {
        let _ = call!(cublasLtMatmulDescDestroy(self.0));
    }
}

impl MatrixLayout {
    /// Describes a column-major matrix whose columns have no gaps between them.
    fn new(element: lt::cudaDataType_t, rows: usize, columns: usize) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        call!(cublasLtMatrixLayoutCreate(
            &raw mut handle,
            element,
            rows as u64,
            columns as u64,
            rows as i64,
        ))?;
        Ok(Self(handle))
    }
}

impl Drop for MatrixLayout {
    fn drop(&mut self) {
        let _ = call!(cublasLtMatrixLayoutDestroy(self.0));
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        self.chosen.clear();
        let _ = call!(cublasLtDestroy(self.handle));
    }
}

//! NVIDIA's matrix products (cublasLt), where they are wanted and installed.
//!
//! Owns: the library's handle, its workspace, and the algorithm chosen for each shape.
//! Never: computes a bit the same for different numbers of rows: which algorithm runs depends on them. Whoever
//! uses it gives up path independence, and says so in the fingerprint.
//! Invariant: an algorithm is asked for once for each shape; after that nothing is allocated.

use crate::driver::{DeviceMemory, Stream};
use crate::error::CudaError;
use crate::matmul::{Product, Target};
use cleave_engine::ops::Precision;
use cudarc::cublaslt::sys as lt;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;

/// What NVIDIA's guide gives on Hopper; less makes some algorithms impossible.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The library on one device.
#[derive(Debug)]
pub(crate) struct Library {
    handle: lt::cublasLtHandle_t,
    workspace: DeviceMemory,
    chosen: BTreeMap<Shape, Chosen>,
}

// SAFETY: the library may be called from any thread, one at a time for a handle's descriptors.
unsafe impl Send for Library {}

/// What an algorithm is chosen by: rows, columns, width, and whether the result is f32.
type Shape = (usize, usize, usize, bool);

#[derive(Debug)]
struct Chosen {
    operation: Descriptor,
    weights: Layout,
    x: Layout,
    out: Layout,
    algorithm: lt::cublasLtMatmulAlgo_t,
}

/// An operation's description, given back when dropped.
#[derive(Debug)]
struct Descriptor(lt::cublasLtMatmulDesc_t);

/// A matrix's description, given back when dropped.
#[derive(Debug)]
struct Layout(lt::cublasLtMatrixLayout_t);

/// Calls the library, which is there, since `Library::new` looked; what is created is alive.
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
        // The driver reports how the device failed.
        is_for_good: false,
    })
}

/// The library's word for a status.
fn describe(status: c_int, function: &str) -> Option<String> {
    type Describe = unsafe extern "C" fn(c_int) -> *const c_char;
    // SAFETY: the function is of that type, and gives a static string for every number.
    unsafe {
        let found = lt::culib().get::<Describe>(function.as_bytes()).ok()?;
        let text = found(status);
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}

impl Library {
    /// Opens the library.
    ///
    /// # Errors
    /// If it is not installed, or has no memory.
    pub(crate) fn new(stream: &Stream) -> Result<Self, CudaError> {
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

    /// `out = x · matrix`, bf16 in, f32 sums. The library's matrices are column-major, so it makes the
    /// transpose of what is asked for: weights times rows.
    pub(crate) fn run(
        &mut self,
        stream: &Stream,
        product: &Product<'_>,
        target: Target,
    ) -> Result<(), CudaError> {
        let Product {
            matrix,
            rows: _,
            bucket: rows,
            x,
        } = *product;
        let shape = (
            rows,
            matrix.columns,
            matrix.width,
            target.stored == Precision::F32,
        );
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
            x.address() as *const c_void,
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

    fn choose(&self, (rows, columns, width, is_f32): Shape) -> Result<Chosen, CudaError> {
        let bf16 = lt::cudaDataType_t::CUDA_R_16BF;
        let out_type = match is_f32 {
            true => lt::cudaDataType_t::CUDA_R_32F,
            false => bf16,
        };
        let operation = Descriptor::new()?;
        let weights = Layout::new(bf16, (width, columns))?;
        let x = Layout::new(bf16, (width, rows))?;
        let out = Layout::new(out_type, (columns, rows))?;
        let mut preference = std::ptr::null_mut();
        call!(cublasLtMatmulPreferenceCreate(&raw mut preference))?;
        let most = WORKSPACE_BYTES as u64;
        let told = call!(cublasLtMatmulPreferenceSetAttribute(
            preference,
            lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&raw const most).cast(),
            size_of::<u64>(),
        ));
        // Its status may be one that the binding's enum does not list, so only the algorithm is read.
        let mut found = MaybeUninit::<lt::cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut count = 0;
        let asked = told.and_then(|()| {
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
        let _ = call!(cublasLtMatmulPreferenceDestroy(preference));
        asked?;
        if count == 0 {
            return Err(CudaError::NoKernels(format!(
                "cublasLt has no algorithm for {rows} rows times ({columns}, {width}); leave --gpu-matmul fast out"
            )));
        }
        Ok(Chosen {
            operation,
            weights,
            x,
            out,
            // SAFETY: the library filled it in, and any bits make an algorithm.
            algorithm: unsafe { (&raw const (*found.as_ptr()).algo).read() },
        })
    }
}

impl Descriptor {
    /// f32 sums, the first matrix transposed.
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

impl Drop for Descriptor {
    fn drop(&mut self) {
        let _ = call!(cublasLtMatmulDescDestroy(self.0));
    }
}

impl Layout {
    /// Column-major, columns without gaps.
    fn new(of: lt::cudaDataType_t, (rows, columns): (usize, usize)) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        call!(cublasLtMatrixLayoutCreate(
            &raw mut handle,
            of,
            rows as u64,
            columns as u64,
            rows as i64,
        ))?;
        Ok(Self(handle))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        let _ = call!(cublasLtMatrixLayoutDestroy(self.0));
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        self.chosen.clear();
        let _ = call!(cublasLtDestroy(self.handle));
    }
}

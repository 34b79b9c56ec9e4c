//! NVIDIA's transfer library, loaded at run time: the few functions that a link needs.
//!
//! Owns: the types of the functions, every call, and the agents, registrations and writes. Never:
//! decides when anything is written; creates a thread.
//! Invariant: an agent is used only by the thread that created it; its memory is registered for no
//! longer than it is mapped; a loaded library is never unloaded, because it has thread-local data
//! and handlers of its own.

#![allow(unsafe_code)]

use super::note::NOTE_BYTES;
use crate::transports::shm::MappedArea;
use std::ffi::{CString, OsStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// An object of the library.
pub(super) type NixlHandle = *mut c_void;

/// The configuration of an agent: `nixl_capi_agent_config_t`.
#[repr(C)]
pub(super) struct NixlAgentConfig {
    progress_thread: bool,
    listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_int,
    workers_count: c_uint,
    progress_delay_us: u64,
    listen_delay_us: u64,
    telemetry: bool,
}

/// `NIXL_CAPI_THREAD_SYNC_NONE`: only the thread that created an agent uses it.
const ONE_THREAD: c_int = 0;
/// `NIXL_CAPI_MEM_DRAM` of the C interface.
const HOST_MEMORY: c_int = 0;
/// `NIXL_CAPI_XFER_OP_WRITE` of the C interface.
const WRITE: c_int = 1;
/// `NIXL_CAPI_SUCCESS` of the C interface.
const DONE: c_int = 0;
/// `NIXL_CAPI_IN_PROG` of the C interface.
pub(super) const IN_PROGRESS: c_int = 1;
/// The plugin of the library that carries the bytes.
const BACKEND: &std::ffi::CStr = c"UCX";

/// Declares the functions that are loaded from the library, and their lookup.
macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        #[derive(Clone, Copy)]
        pub(super) struct NixlFunctions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl NixlFunctions {
            /// # Safety
            /// The functions of the library with these names must have the types of its header.
            unsafe fn find(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the caller vouches for every type; the library is never unloaded.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!("nixl_capi_", stringify!($name), "\0").as_bytes())?,)*
                    })
                }
            }
        }
    };
}

// The signatures of the C header since release 1.5.
functions! {
    create_configured_agent(*const c_char, *const NixlAgentConfig, *mut NixlHandle);
    destroy_agent(NixlHandle);
    create_params(*mut NixlHandle);
    params_add(NixlHandle, *const c_char, *const c_char);
    destroy_params(NixlHandle);
    create_backend(NixlHandle, *const c_char, NixlHandle, *mut NixlHandle);
    destroy_backend(NixlHandle);
    create_reg_dlist(c_int, *mut NixlHandle);
    reg_dlist_add_desc(NixlHandle, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist(NixlHandle);
    register_mem(NixlHandle, NixlHandle, NixlHandle);
    deregister_mem(NixlHandle, NixlHandle, NixlHandle);
    get_local_md(NixlHandle, *mut *mut c_void, *mut usize);
    load_remote_md(NixlHandle, *const c_void, usize, *mut *mut c_char);
    create_xfer_dlist(c_int, *mut NixlHandle);
    xfer_dlist_add_desc(NixlHandle, usize, usize, u64);
    destroy_xfer_dlist(NixlHandle);
    create_opt_args(*mut NixlHandle);
    opt_args_set_notif_msg(NixlHandle, *const c_void, usize);
    opt_args_set_has_notif(NixlHandle, bool);
    destroy_opt_args(NixlHandle);
    create_xfer_req(NixlHandle, c_int, NixlHandle, NixlHandle, *const c_char, *mut NixlHandle, NixlHandle);
    post_xfer_req(NixlHandle, NixlHandle, NixlHandle);
    get_xfer_status(NixlHandle, NixlHandle);
    release_xfer_req(NixlHandle, NixlHandle);
    destroy_xfer_req(NixlHandle);
    create_notif_map(*mut NixlHandle);
    get_notifs(NixlHandle, NixlHandle, NixlHandle);
    notif_map_size(NixlHandle, *mut usize);
    notif_map_get_agent_at(NixlHandle, usize, *mut *const c_char);
    notif_map_get_notifs_size(NixlHandle, *const c_char, *mut usize);
    notif_map_get_notif(NixlHandle, *const c_char, usize, *mut *const c_void, *mut usize);
    notif_map_clear(NixlHandle);
    destroy_notif_map(NixlHandle);
}

unsafe extern "C" {
    /// The function of the C library; the library allocates what it returns with `malloc`.
    fn free(memory: *mut c_void);
}

/// The loaded library, which is never unloaded.
pub(super) struct NixlLibrary {
    functions: NixlFunctions,
    _loaded: ManuallyDrop<libloading::Library>,
}

/// The library with changed functions, which fail.
#[cfg(test)]
pub(super) fn with_functions(
    name: &OsStr,
    change: impl FnOnce(&mut NixlFunctions),
) -> Arc<NixlLibrary> {
    let library = NixlLibrary::load(name).expect("it was loaded before");
    let mut library = Arc::into_inner(library).expect("nobody else has it");
    change(&mut library.functions);
    Arc::new(library)
}

impl fmt::Debug for NixlLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

/// A failed call, with the status code of the library.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation} failed with status {status} ({})", meaning(*.status))]
pub(crate) struct NixlCallError {
    operation: &'static str,
    status: c_int,
}

fn meaning(status: c_int) -> &'static str {
    match status {
        -1 => "invalid parameter",
        -2 => "the backend failed",
        -3 => "invalid state",
        -4 => "exception",
        -6 => "not found",
        _ => "unknown",
    }
}

fn check(operation: &'static str, status: c_int) -> Result<(), NixlCallError> {
    match status {
        DONE => Ok(()),
        status => Err(NixlCallError { operation, status }),
    }
}

impl NixlLibrary {
    /// Loads the library by path, or by a name that the loader knows.
    pub(super) fn load(name: &OsStr) -> Result<Arc<Self>, libloading::Error> {
        // SAFETY: the operator names the library; loading it is like linking this program with it.
        let loaded = unsafe { libloading::Library::new(name) }?;
        // SAFETY: a library with all these names is NIXL's C interface, whose types these are.
        let functions = unsafe { NixlFunctions::find(&loaded) }?;
        Ok(Arc::new(Self {
            functions,
            _loaded: ManuallyDrop::new(loaded),
        }))
    }
}

/// An object of the library that is destroyed when this is dropped.
struct OwnedHandle {
    handle: NixlHandle,
    destroy: unsafe extern "C" fn(NixlHandle) -> c_int,
}

impl OwnedHandle {
    /// Owns the object that `create` makes.
    fn new(
        operation: &'static str,
        create: impl FnOnce(*mut NixlHandle) -> c_int,
        destroy: unsafe extern "C" fn(NixlHandle) -> c_int,
    ) -> Result<Self, NixlCallError> {
        let mut handle = null_mut();
        check(operation, create(&raw mut handle))?;
        Ok(Self { handle, destroy })
    }
}

impl Drop for OwnedHandle {
    fn drop(&mut self) {
        // SAFETY: the handle was made by the function that matches this one, and has no other user.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// The agent of one end of a link, with its memory. It stays on the thread that created it.
pub(super) struct NixlAgent {
    library: Arc<NixlLibrary>,
    // Destroyed in this order, by `drop`.
    registered: OwnedHandle,
    notifications: OwnedHandle,
    _backend: OwnedHandle,
    agent: OwnedHandle,
    area: MappedArea,
    one_thread: PhantomData<*mut ()>,
}

/// The parameters of an agent.
pub(super) struct NixlAgentParts<'a> {
    /// Unique among all agents that this agent meets.
    pub(super) name: &'a str,
    /// Names and values of backend parameters.
    pub(super) parameters: &'a [(&'a str, &'a str)],
    /// The memory that peers write to, or that is written from. It stays mapped while the agent
    /// exists.
    pub(super) area: MappedArea,
}

/// A remote agent, loaded from its metadata.
pub(super) struct RemoteAgent {
    name: CString,
}

/// A write in progress.
pub(super) struct PendingRdmaWrite {
    request: NixlHandle,
    is_done: bool,
}

/// A write: bytes of the agent's memory, to an address of the remote process.
pub(super) struct RdmaWriteRequest {
    /// Offset in the agent's memory.
    pub(super) from: usize,
    /// Address in the remote process.
    pub(super) to: u64,
    pub(super) len: usize,
    /// The note that the remote agent receives once the bytes are written.
    pub(super) note: [u8; NOTE_BYTES],
}

impl NixlAgent {
    /// Creates an agent and registers its memory.
    pub(super) fn new(
        library: &Arc<NixlLibrary>,
        parts: &NixlAgentParts<'_>,
    ) -> Result<Self, NixlCallError> {
        let functions = &library.functions;
        let name = c_string(parts.name);
        let config = NixlAgentConfig {
            // A progress thread would poll the devices without pause, even while idle.
            progress_thread: false,
            listen_thread: false,
            listen_port: 0,
            thread_sync: ONE_THREAD,
            workers_count: 1,
            progress_delay_us: 0,
            listen_delay_us: 100_000,
            telemetry: false,
        };
        // SAFETY: name and config live through the call, which copies them.
        let create = |agent| unsafe {
            (functions.create_configured_agent)(name.as_ptr(), &raw const config, agent)
        };
        let agent = OwnedHandle::new("making an agent", create, functions.destroy_agent)?;
        let backend = backend(functions, &agent, parts.parameters)?;
        let registered = registration_list(functions, parts.area)?;
        // SAFETY: both objects are of this library; the memory is mapped and stays mapped, as
        // `parts` requires.
        let status =
            unsafe { (functions.register_mem)(agent.handle, registered.handle, null_mut()) };
        check("registering memory", status)?;
        // SAFETY: the call only writes a handle.
        let create = |map| unsafe { (functions.create_notif_map)(map) };
        let notifications = OwnedHandle::new("making a list", create, functions.destroy_notif_map)?;
        Ok(Self {
            library: Arc::clone(library),
            registered,
            notifications,
            _backend: backend,
            agent,
            area: parts.area,
            one_thread: PhantomData,
        })
    }

    /// The metadata that another agent needs to write to this agent's memory.
    pub(super) fn metadata(&self) -> Result<Vec<u8>, NixlCallError> {
        let (mut start, mut len) = (null_mut(), 0);
        let functions = &self.library.functions;
        // SAFETY: the agent is there; both places are written before they are read.
        let status =
            unsafe { (functions.get_local_md)(self.agent.handle, &raw mut start, &raw mut len) };
        check("reading metadata", status)?;
        let Some(bytes) = NonNull::new(start.cast::<u8>()) else {
            return Ok(Vec::new());
        };
        // SAFETY: the library allocated and filled this many bytes there; they are copied, and
        // freed once.
        unsafe {
            let metadata = std::slice::from_raw_parts(bytes.as_ptr(), len).to_vec();
            free(start);
            Ok(metadata)
        }
    }

    /// Loads another agent. The metadata was checked (`metadata`) as far as its format is known; in
    /// the two parts that belong to UCX the library trusts every length.
    pub(super) fn load_remote(&self, metadata: &[u8]) -> Result<RemoteAgent, NixlCallError> {
        let mut name = null_mut();
        // SAFETY: the bytes live through the call; the name is written before it is read.
        let status = unsafe {
            (self.library.functions.load_remote_md)(
                self.agent.handle,
                metadata.as_ptr().cast(),
                metadata.len(),
                &raw mut name,
            )
        };
        check("reading the peer's metadata", status)?;
        // SAFETY: the call gave a string that was allocated for the caller, who copies it and gives
        // it back once.
        let name = unsafe {
            let copy = std::ffi::CStr::from_ptr(name).to_owned();
            free(name.cast());
            copy
        };
        Ok(RemoteAgent { name })
    }

    /// Begins a write into the peer's memory.
    pub(super) fn write(
        &self,
        remote: &RemoteAgent,
        order: &RdmaWriteRequest,
    ) -> Result<PendingRdmaWrite, NixlCallError> {
        let functions = &self.library.functions;
        let is_inside = order.from.checked_add(order.len);
        assert!(
            is_inside.is_some_and(|end| end <= self.area.len),
            "bytes of this agent's memory are sent"
        );
        let from = transfer_list(functions, self.area.start + order.from, order.len)?;
        let to = usize::try_from(order.to).expect("addresses have 64 bits");
        let to = transfer_list(functions, to, order.len)?;
        // SAFETY: the call only writes a handle.
        let create = |options| unsafe { (functions.create_opt_args)(options) };
        let options = OwnedHandle::new("making options", create, functions.destroy_opt_args)?;
        // SAFETY: the note lives through the call, which copies it.
        let status = unsafe {
            let note = order.note;
            (functions.opt_args_set_notif_msg)(options.handle, note.as_ptr().cast(), note.len())
        };
        check("setting a note", status)?;
        // SAFETY: the options are there.
        let status = unsafe { (functions.opt_args_set_has_notif)(options.handle, true) };
        check("setting a note", status)?;
        let mut request = null_mut();
        // SAFETY: everything is of this library and lives through the call; the library checks that
        // the far bytes are in memory that the peer registered. The near ones stay mapped for as
        // long as the agent is there.
        let status = unsafe {
            (functions.create_xfer_req)(
                self.agent.handle,
                WRITE,
                from.handle,
                to.handle,
                remote.name.as_ptr(),
                &raw mut request,
                options.handle,
            )
        };
        check("preparing a write", status)?;
        // SAFETY: the request was just made, for this agent.
        let status =
            unsafe { (functions.post_xfer_req)(self.agent.handle, request, options.handle) };
        let mut write = PendingRdmaWrite {
            request,
            is_done: status == DONE,
        };
        if status != DONE && status != IN_PROGRESS {
            self.release(&mut write);
            check("beginning a write", status)?;
        }
        Ok(write)
    }

    /// Whether a write has completed. The call also drives all other operations in progress.
    pub(super) fn poll_done(&self, write: &mut PendingRdmaWrite) -> Result<bool, NixlCallError> {
        if !write.is_done {
            // SAFETY: the request is one of this agent's, and was not released.
            let status = unsafe {
                (self.library.functions.get_xfer_status)(self.agent.handle, write.request)
            };
            match status {
                IN_PROGRESS => return Ok(false),
                status => check("a write", status)?,
            }
            write.is_done = true;
        }
        Ok(true)
    }

    /// Releases a write; one in progress may still complete.
    pub(super) fn release(&self, write: &mut PendingRdmaWrite) {
        let functions = &self.library.functions;
        if write.request.is_null() {
            return;
        }
        // SAFETY: the request is one of this agent's, and this is its only release. One that cannot
        // be released is kept by the library until the agent's end.
        unsafe {
            if (functions.release_xfer_req)(self.agent.handle, write.request) == DONE {
                (functions.destroy_xfer_req)(write.request);
            }
        }
        write.request = null_mut();
    }

    /// Passes every new note to `handle_note`. The call also drives all operations in progress.
    pub(super) fn read_notes(
        &self,
        mut handle_note: impl FnMut(&[u8]),
    ) -> Result<(), NixlCallError> {
        let functions = &self.library.functions;
        let map = self.notifications.handle;
        // SAFETY: agent and list are there.
        let status = unsafe { (functions.get_notifs)(self.agent.handle, map, null_mut()) };
        check("hearing of writes", status)?;
        let mut agents_count = 0;
        // SAFETY: the list is there; what is asked for is inside it, and is not changed until it is
        // cleared below. Every place is written by a call that succeeded before it is read.
        unsafe {
            check(
                "a list",
                (functions.notif_map_size)(map, &raw mut agents_count),
            )?;
            if agents_count == 0 {
                return Ok(());
            }
            for index in 0..agents_count {
                let (mut name, mut notes_count) = (std::ptr::null(), 0);
                let status = (functions.notif_map_get_agent_at)(map, index, &raw mut name);
                check("a list", status)?;
                let status = (functions.notif_map_get_notifs_size)(map, name, &raw mut notes_count);
                check("a list", status)?;
                for note in 0..notes_count {
                    let (mut bytes, mut len) = (std::ptr::null(), 0);
                    let (bytes_at, len_at) = (&raw mut bytes, &raw mut len);
                    let status = (functions.notif_map_get_notif)(map, name, note, bytes_at, len_at);
                    check("a list", status)?;
                    if !bytes.is_null() {
                        handle_note(std::slice::from_raw_parts(bytes.cast(), len));
                    }
                }
            }
            check("a list", (functions.notif_map_clear)(map))
        }
    }
}

impl Drop for NixlAgent {
    fn drop(&mut self) {
        let functions = &self.library.functions;
        // SAFETY: the memory was registered with this agent, which is there until after this. From
        // here on the card refuses late writes; those that the library would carry out itself end
        // with the agent.
        unsafe {
            (functions.deregister_mem)(self.agent.handle, self.registered.handle, null_mut());
        }
    }
}

impl fmt::Debug for NixlAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { area, .. } = self;
        f.debug_struct("Agent")
            .field("area", area)
            .finish_non_exhaustive()
    }
}

fn c_string(text: &str) -> CString {
    CString::new(text).expect("names and parameters are this crate's own words")
}

fn backend(
    functions: &NixlFunctions,
    agent: &OwnedHandle,
    parameters: &[(&str, &str)],
) -> Result<OwnedHandle, NixlCallError> {
    // SAFETY: the call only writes a handle.
    let create = |params| unsafe { (functions.create_params)(params) };
    let params = OwnedHandle::new("making parameters", create, functions.destroy_params)?;
    for (name, value) in parameters {
        let (name, value) = (c_string(name), c_string(value));
        // SAFETY: both live through the call, which copies them.
        let status =
            unsafe { (functions.params_add)(params.handle, name.as_ptr(), value.as_ptr()) };
        check("setting a parameter", status)?;
    }
    // SAFETY: agent and parameters live through the call.
    let create = |backend| unsafe {
        (functions.create_backend)(agent.handle, BACKEND.as_ptr(), params.handle, backend)
    };
    OwnedHandle::new("making the UCX backend", create, functions.destroy_backend)
}

fn registration_list(
    functions: &NixlFunctions,
    area: MappedArea,
) -> Result<OwnedHandle, NixlCallError> {
    // SAFETY: the call only writes a handle.
    let create = |list| unsafe { (functions.create_reg_dlist)(HOST_MEMORY, list) };
    let list = OwnedHandle::new("making a list", create, functions.destroy_reg_dlist)?;
    // SAFETY: the list is there; without metadata there is nothing to read at its address.
    let status = unsafe {
        let MappedArea { start, len } = area;
        (functions.reg_dlist_add_desc)(list.handle, start, len, 0, std::ptr::null(), 0)
    };
    check("naming memory", status)?;
    Ok(list)
}

fn transfer_list(
    functions: &NixlFunctions,
    start: usize,
    len: usize,
) -> Result<OwnedHandle, NixlCallError> {
    // SAFETY: the call only writes a handle.
    let create = |list| unsafe { (functions.create_xfer_dlist)(HOST_MEMORY, list) };
    let list = OwnedHandle::new("making a list", create, functions.destroy_xfer_dlist)?;
    // SAFETY: the list is there; the address is kept as a number.
    let status = unsafe { (functions.xfer_dlist_add_desc)(list.handle, start, len, 0) };
    check("naming memory", status)?;
    Ok(list)
}

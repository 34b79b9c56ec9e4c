//! NVIDIA's transfer library, loaded at run time: the few of its functions that a link needs.
//!
//! Owns: the functions' types, every call, and what an agent, a registration and a write are. Never: decides when
//! anything is written; makes a thread.
//! Invariant: an agent is used by the thread that made it; its memory is registered for no longer than it is mapped; a
//! library that was loaded stays, because it has threads' data and handlers of its own.

#![allow(unsafe_code)]

use super::note::NOTE_BYTES;
use crate::shared_memory::Area;
use std::ffi::{CString, OsStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// A thing of the library.
pub(super) type Handle = *mut c_void;

/// How an agent is to be: `nixl_capi_agent_config_t`.
#[repr(C)]
pub(super) struct AgentConfig {
    progress_thread: bool,
    listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_int,
    workers_count: c_uint,
    progress_delay_us: u64,
    listen_delay_us: u64,
    telemetry: bool,
}

/// `NIXL_CAPI_THREAD_SYNC_NONE`: whoever made an agent is the only one to use it.
const ONE_THREAD: c_int = 0;
/// `NIXL_CAPI_MEM_DRAM`.
const HOST_MEMORY: c_int = 0;
/// `NIXL_CAPI_XFER_OP_WRITE`.
const WRITE: c_int = 1;
/// `NIXL_CAPI_SUCCESS`.
const DONE: c_int = 0;
/// `NIXL_CAPI_IN_PROG`.
pub(super) const IN_PROGRESS: c_int = 1;
/// What carries the bytes, among the library's plugins.
const BACKEND: &std::ffi::CStr = c"UCX";

/// Declares the functions that are taken from the library, and how they are found.
macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        #[derive(Clone, Copy)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            /// # Safety
            /// What the library has under these names must be what its header says.
            unsafe fn find(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the caller's word for every type; the pointers are used only while the library is there.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!("nixl_capi_", stringify!($name), "\0").as_bytes())?,)*
                    })
                }
            }
        }
    };
}

// As the library's C header has them since 1.5.
functions! {
    create_configured_agent(*const c_char, *const AgentConfig, *mut Handle);
    destroy_agent(Handle);
    create_params(*mut Handle);
    params_add(Handle, *const c_char, *const c_char);
    destroy_params(Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend(Handle);
    create_reg_dlist(c_int, *mut Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist(Handle);
    register_mem(Handle, Handle, Handle);
    deregister_mem(Handle, Handle, Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    create_xfer_dlist(c_int, *mut Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    destroy_xfer_dlist(Handle);
    create_opt_args(*mut Handle);
    opt_args_set_notif_msg(Handle, *const c_void, usize);
    opt_args_set_has_notif(Handle, bool);
    destroy_opt_args(Handle);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
    create_notif_map(*mut Handle);
    get_notifs(Handle, Handle, Handle);
    notif_map_size(Handle, *mut usize);
    notif_map_get_agent_at(Handle, usize, *mut *const c_char);
    notif_map_get_notifs_size(Handle, *const c_char, *mut usize);
    notif_map_get_notif(Handle, *const c_char, usize, *mut *const c_void, *mut usize);
    notif_map_clear(Handle);
    destroy_notif_map(Handle);
}

unsafe extern "C" {
    /// Of the C library: what the library gives away it has allocated with `malloc`.
    fn free(memory: *mut c_void);
}

/// The library, for good.
pub(super) struct Library {
    functions: Functions,
    /// Never unloaded.
    _loaded: ManuallyDrop<libloading::Library>,
}

/// The library as it would be with other functions, which fail.
#[cfg(test)]
pub(super) fn failing(name: &OsStr, change: impl FnOnce(&mut Functions)) -> Arc<Library> {
    let library = Library::load(name).expect("it was loaded before");
    let mut library = Arc::into_inner(library).expect("nobody else has it");
    change(&mut library.functions);
    Arc::new(library)
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

/// What a call came to, in the library's numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} failed with status {status} ({})", meaning(*.status))]
pub(crate) struct CallError {
    what: &'static str,
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

fn check(what: &'static str, status: c_int) -> Result<(), CallError> {
    match status {
        DONE => Ok(()),
        status => Err(CallError { what, status }),
    }
}

impl Library {
    /// Loads it, by path or by a name that the loader knows.
    pub(super) fn load(name: &OsStr) -> Result<Arc<Self>, libloading::Error> {
        // SAFETY: whoever runs this names the library, and it is loaded as if this program were linked with it.
        let loaded = unsafe { libloading::Library::new(name) }?;
        // SAFETY: a library with all these names is NIXL's C interface, whose types these are.
        let functions = unsafe { Functions::find(&loaded) }?;
        Ok(Arc::new(Self {
            functions,
            _loaded: ManuallyDrop::new(loaded),
        }))
    }
}

/// A thing of the library that is given back when this is dropped.
struct Owned {
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
}

impl Owned {
    /// What `create` makes.
    fn new(
        what: &'static str,
        create: impl FnOnce(*mut Handle) -> c_int,
        destroy: unsafe extern "C" fn(Handle) -> c_int,
    ) -> Result<Self, CallError> {
        let mut handle = null_mut();
        check(what, create(&raw mut handle))?;
        Ok(Self { handle, destroy })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: it was made by the function that goes with this one, and nobody has it any more.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// One end of one link, with its memory. It stays on the thread that made it.
pub(super) struct Agent {
    library: Arc<Library>,
    // Given back in this order, by `drop`.
    registered: Owned,
    notifications: Owned,
    _backend: Owned,
    agent: Owned,
    area: Area,
    one_thread: PhantomData<*mut ()>,
}

/// What an agent is made of.
pub(super) struct AgentParts<'a> {
    /// Unlike that of any other agent it hears of.
    pub(super) name: &'a str,
    /// For the backend: names and values.
    pub(super) parameters: &'a [(&'a str, &'a str)],
    /// The memory that others write to, or that is written from. It stays mapped for as long as the agent is there.
    pub(super) area: Area,
}

/// The other end, as its metadata made it known.
pub(super) struct Remote {
    name: CString,
}

/// A write that was begun.
pub(super) struct Write {
    request: Handle,
    is_done: bool,
}

/// One write: bytes of the agent's memory, to an address of the other's.
pub(super) struct Order {
    /// From the beginning of the agent's memory.
    pub(super) from: usize,
    /// In the other process.
    pub(super) to: u64,
    pub(super) len: usize,
    /// What the other end hears once the bytes are there.
    pub(super) note: [u8; NOTE_BYTES],
}

impl Agent {
    /// Makes an agent and registers its memory.
    pub(super) fn new(library: &Arc<Library>, parts: &AgentParts<'_>) -> Result<Self, CallError> {
        let functions = &library.functions;
        let name = c_string(parts.name);
        let config = AgentConfig {
            // It would ask the devices without rest, also when nothing is under way.
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
        let agent = Owned::new("making an agent", create, functions.destroy_agent)?;
        let backend = backend(functions, &agent, parts.parameters)?;
        let registered = area(functions, parts.area)?;
        // SAFETY: both are of this library; the memory is mapped, and stays so, as `parts` says.
        let status =
            unsafe { (functions.register_mem)(agent.handle, registered.handle, null_mut()) };
        check("registering memory", status)?;
        // SAFETY: it writes a handle.
        let create = |map| unsafe { (functions.create_notif_map)(map) };
        let notifications = Owned::new("making a list", create, functions.destroy_notif_map)?;
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

    /// What another agent needs to write to this one's memory.
    pub(super) fn metadata(&self) -> Result<Vec<u8>, CallError> {
        let (mut start, mut len) = (null_mut(), 0);
        let functions = &self.library.functions;
        // SAFETY: the agent is there; both places are written before they are read.
        let status =
            unsafe { (functions.get_local_md)(self.agent.handle, &raw mut start, &raw mut len) };
        check("reading metadata", status)?;
        let Some(bytes) = NonNull::new(start.cast::<u8>()) else {
            return Ok(Vec::new());
        };
        // SAFETY: so many bytes were allocated there and filled; they are given back once, after they were copied.
        unsafe {
            let metadata = std::slice::from_raw_parts(bytes.as_ptr(), len).to_vec();
            free(start);
            Ok(metadata)
        }
    }

    /// Learns of another agent. Its metadata is what an agent writes as far as that can be seen (`metadata`): of the two
    /// parts that are UCX's own the library believes every length.
    pub(super) fn know(&self, metadata: &[u8]) -> Result<Remote, CallError> {
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
        // SAFETY: the call gave a string that was allocated for the caller, who copies it and gives it back once.
        let name = unsafe {
            let copy = std::ffi::CStr::from_ptr(name).to_owned();
            free(name.cast());
            copy
        };
        Ok(Remote { name })
    }

    /// Begins a write.
    pub(super) fn write(&self, remote: &Remote, order: &Order) -> Result<Write, CallError> {
        let functions = &self.library.functions;
        let is_inside = order.from.checked_add(order.len);
        assert!(
            is_inside.is_some_and(|end| end <= self.area.len),
            "bytes of this agent's memory are sent"
        );
        let from = span(functions, self.area.start + order.from, order.len)?;
        let to = usize::try_from(order.to).expect("addresses have 64 bits");
        let to = span(functions, to, order.len)?;
        // SAFETY: it writes a handle.
        let create = |options| unsafe { (functions.create_opt_args)(options) };
        let options = Owned::new("making options", create, functions.destroy_opt_args)?;
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
        // SAFETY: everything is of this library and lives through the call; the library checks that the far bytes are in
        // memory that the peer registered. The near ones stay mapped for as long as the agent is there.
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
        let mut write = Write {
            request,
            is_done: status == DONE,
        };
        if status != DONE && status != IN_PROGRESS {
            self.release(&mut write);
            check("beginning a write", status)?;
        }
        Ok(write)
    }

    /// Whether a write is over. Everything that is under way goes on meanwhile.
    pub(super) fn is_done(&self, write: &mut Write) -> Result<bool, CallError> {
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

    /// Lets go of a write, also of one that is not over: then it may be or not.
    pub(super) fn release(&self, write: &mut Write) {
        let functions = &self.library.functions;
        if write.request.is_null() {
            return;
        }
        // SAFETY: the request is one of this agent's, and this is its only release. One that cannot be released is kept
        // by the library until the agent's end.
        unsafe {
            if (functions.release_xfer_req)(self.agent.handle, write.request) == DONE {
                (functions.destroy_xfer_req)(write.request);
            }
        }
        write.request = null_mut();
    }

    /// Gives `hear` every note that came since it was last asked. Everything that is under way goes on meanwhile.
    pub(super) fn notes(&self, mut hear: impl FnMut(&[u8])) -> Result<(), CallError> {
        let functions = &self.library.functions;
        let map = self.notifications.handle;
        // SAFETY: agent and list are there.
        let status = unsafe { (functions.get_notifs)(self.agent.handle, map, null_mut()) };
        check("hearing of writes", status)?;
        let mut agents_count = 0;
        // SAFETY: the list is there; what is asked for is inside it, and is not changed until it is cleared below. Every
        // place is written by a call that succeeded before it is read.
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
                        hear(std::slice::from_raw_parts(bytes.cast(), len));
                    }
                }
            }
            check("a list", (functions.notif_map_clear)(map))
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let functions = &self.library.functions;
        // SAFETY: the memory was registered with this agent, which is there until after this. From here on the card
        // refuses late writes; those that the library would carry out itself end with the agent.
        unsafe {
            (functions.deregister_mem)(self.agent.handle, self.registered.handle, null_mut());
        }
    }
}

impl fmt::Debug for Agent {
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
    functions: &Functions,
    agent: &Owned,
    parameters: &[(&str, &str)],
) -> Result<Owned, CallError> {
    // SAFETY: it writes a handle.
    let create = |params| unsafe { (functions.create_params)(params) };
    let params = Owned::new("making parameters", create, functions.destroy_params)?;
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
    Owned::new("making the UCX backend", create, functions.destroy_backend)
}

fn area(functions: &Functions, area: Area) -> Result<Owned, CallError> {
    // SAFETY: it writes a handle.
    let create = |list| unsafe { (functions.create_reg_dlist)(HOST_MEMORY, list) };
    let list = Owned::new("making a list", create, functions.destroy_reg_dlist)?;
    // SAFETY: the list is there; without metadata there is nothing to read at its address.
    let status = unsafe {
        let Area { start, len } = area;
        (functions.reg_dlist_add_desc)(list.handle, start, len, 0, std::ptr::null(), 0)
    };
    check("naming memory", status)?;
    Ok(list)
}

fn span(functions: &Functions, start: usize, len: usize) -> Result<Owned, CallError> {
    // SAFETY: it writes a handle.
    let create = |list| unsafe { (functions.create_xfer_dlist)(HOST_MEMORY, list) };
    let list = Owned::new("making a list", create, functions.destroy_xfer_dlist)?;
    // SAFETY: the list is there; the address is kept as a number.
    let status = unsafe { (functions.xfer_dlist_add_desc)(list.handle, start, len, 0) };
    check("naming memory", status)?;
    Ok(list)
}

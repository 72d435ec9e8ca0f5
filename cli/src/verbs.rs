//! The system's libibverbs, loaded on demand: its file, and the few calls that `urnic info` needs.

use std::ffi::{OsStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use urnic_rdma_core::{Pabi, ibv_context, ibv_device, ibv_device_attr, ibv_gid, ibv_port_attr};
use urnic_sys::Plain;
use urnic_sys::loader::{LoadedFile, file_of};

/// The loaded library. It stays loaded: a library that started threads cannot be unloaded safely.
pub(crate) struct Verbs {
    file: ManuallyDrop<LoadedFile>,
}

impl Verbs {
    /// Loads the `libibverbs.so.1` that the loader finds.
    ///
    /// # Errors
    /// The loader's error message.
    pub(crate) fn load() -> Result<Self, String> {
        // SAFETY: running the library's constructors is what any verbs program does at start.
        let file = ManuallyDrop::new(unsafe { LoadedFile::load(c"libibverbs.so.1") }?);
        Ok(Self { file })
    }

    /// The file from which the library was loaded, links resolved: `…/libibverbs.so.1.14.44.0`
    /// names rdma-core 44.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        let containing = file_of(self.file.symbol(c"ibv_get_device_list"))?;
        std::fs::canonicalize(OsStr::from_bytes(containing.name.to_bytes())).ok()
    }

    /// The library's private provider ABI, if the plug-in supports it.
    pub(crate) fn provider_abi(&self) -> Option<Pabi> {
        Pabi::ALL
            .into_iter()
            .find(|abi| !self.file.symbol(abi.register_symbol()).is_null())
    }

    /// Opens the device with this name.
    ///
    /// # Errors
    /// The missing part, in one line.
    pub(crate) fn open(&self, name: &str) -> Result<Device<'_>, String> {
        let calls = Calls::find(self)?;
        let mut count = 0;
        // SAFETY: the signature is ibv_get_device_list's (ibv_get_device_list(3)).
        let list = unsafe { (calls.get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(format!(
                "ibv_get_device_list: {}",
                std::io::Error::last_os_error()
            ));
        }
        // SAFETY: the list holds `count` valid devices until it is freed below.
        let devices = unsafe { std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or_default()) };
        // SAFETY: the device is valid until the list is freed.
        let named = |device: &&*mut ibv_device| text(unsafe { &(***device).name }) == name;
        let device = devices.iter().find(named).copied();
        // SAFETY: the device is in the list, which is freed only below.
        let context = device.map(|device| unsafe { (calls.open_device)(device) });
        let error = std::io::Error::last_os_error();
        // SAFETY: the list came from ibv_get_device_list; an open device keeps the parts that it
        // needs.
        unsafe { (calls.free_device_list)(list) };
        match context {
            None => Err(format!(
                "libibverbs lists {count} devices, and no {name} among them"
            )),
            Some(context) if context.is_null() => Err(format!("ibv_open_device({name}): {error}")),
            Some(context) => Ok(Device {
                _library: self,
                calls,
                context,
            }),
        }
    }
}

/// An open device, which is closed on drop.
pub(crate) struct Device<'a> {
    _library: &'a Verbs,
    calls: Calls,
    context: *mut ibv_context,
}

impl Device<'_> {
    /// `ibv_query_device(3)`.
    pub(crate) fn attributes(&self) -> Result<ibv_device_attr, String> {
        let mut attr = ibv_device_attr::zeroes();
        // SAFETY: the context is open; `attr` is the struct of the public header.
        match unsafe { (self.calls.query_device)(self.context, &raw mut attr) } {
            0 => Ok(attr),
            errno => Err(format!(
                "ibv_query_device: {}",
                std::io::Error::from_raw_os_error(errno)
            )),
        }
    }

    /// `ibv_query_port(3)`.
    pub(crate) fn port(&self, number: u8) -> Result<ibv_port_attr, String> {
        let mut attr = ibv_port_attr::zeroes();
        // SAFETY: the context is open; the library writes no more than the public struct, of which
        // this is the newest form.
        match unsafe { (self.calls.query_port)(self.context, number, &raw mut attr) } {
            0 => Ok(attr),
            errno => Err(format!(
                "ibv_query_port({number}): {}",
                std::io::Error::from_raw_os_error(errno)
            )),
        }
    }

    /// `ibv_query_gid(3)`.
    pub(crate) fn gid(&self, port: u8, index: c_int) -> Result<ibv_gid, String> {
        let mut gid = ibv_gid::default();
        // SAFETY: the context is open; a GID is sixteen bytes.
        match unsafe { (self.calls.query_gid)(self.context, port, index, &raw mut gid) } {
            0 => Ok(gid),
            _ => Err(format!(
                "ibv_query_gid({port}, {index}): {}",
                std::io::Error::last_os_error()
            )),
        }
    }
}

impl Drop for Device<'_> {
    fn drop(&mut self) {
        // SAFETY: this program opened the context and closes it only here.
        unsafe { (self.calls.close_device)(self.context) };
    }
}

// The public functions' types, as their man pages declare them.
type GetDeviceList = unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device;
type FreeDeviceList = unsafe extern "C" fn(*mut *mut ibv_device);
type OpenDevice = unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context;
type CloseDevice = unsafe extern "C" fn(*mut ibv_context) -> c_int;
type QueryDevice = unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
type QueryPort = unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
type QueryGid = unsafe extern "C" fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;

struct Calls {
    get_device_list: GetDeviceList,
    free_device_list: FreeDeviceList,
    open_device: OpenDevice,
    close_device: CloseDevice,
    query_device: QueryDevice,
    query_port: QueryPort,
    query_gid: QueryGid,
}

impl Calls {
    fn find(verbs: &Verbs) -> Result<Self, String> {
        macro_rules! call {
            ($name:literal: $type:ty) => {{
                let address = verbs.file.symbol($name);
                if address.is_null() {
                    return Err(format!("libibverbs has no {}", $name.to_string_lossy()));
                }
                // SAFETY: a non-null address of the exported function of that name, which has that
                // type.
                unsafe { std::mem::transmute::<*mut c_void, $type>(address) }
            }};
        }
        Ok(Self {
            get_device_list: call!(c"ibv_get_device_list": GetDeviceList),
            free_device_list: call!(c"ibv_free_device_list": FreeDeviceList),
            open_device: call!(c"ibv_open_device": OpenDevice),
            close_device: call!(c"ibv_close_device": CloseDevice),
            query_device: call!(c"ibv_query_device": QueryDevice),
            query_port: call!(c"ibv_query_port": QueryPort),
            query_gid: call!(c"ibv_query_gid": QueryGid),
        })
    }
}

/// The text in a C array, which may fill the whole array.
pub(crate) fn text(array: &[c_char]) -> String {
    let bytes: Vec<u8> = array
        .iter()
        .map(|c| *c as u8)
        .take_while(|byte| *byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

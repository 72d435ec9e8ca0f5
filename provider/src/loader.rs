//! Queries of the loader: the files in the process, and the symbols in them.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::{self, NonNull};

/// The first definition of a symbol in the program's search order; null if there is none.
pub(crate) fn definition(name: &CStr) -> *mut c_void {
    symbol(libc::RTLD_DEFAULT, name)
}

/// The definition of a symbol after that of this plug-in; null if there is none.
pub(crate) fn next_definition(name: &CStr) -> *mut c_void {
    symbol(libc::RTLD_NEXT, name)
}

fn symbol(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: a pseudo handle, or that of a `LoadedFile`, and a C string.
    unsafe { libc::dlsym(handle, name.as_ptr()) }
}

/// A file that the program has loaded, which stays loaded as long as this value exists.
pub(crate) struct LoadedFile(NonNull<c_void>);

impl LoadedFile {
    /// The loaded file of this name; `None` if there is none.
    pub(crate) fn find(name: &CStr) -> Option<LoadedFile> {
        // SAFETY: the name is a C string; NOLOAD runs no constructor.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        NonNull::new(handle).map(LoadedFile)
    }

    /// A symbol of the file, or of those that it needs; null if there is none.
    pub(crate) fn symbol(&self, name: &CStr) -> *mut c_void {
        symbol(self.0.as_ptr(), name)
    }

    /// A symbol with this version; null if there is none.
    #[cfg(target_env = "gnu")]
    pub(crate) fn versioned(&self, name: &CStr, version: &CStr) -> *mut c_void {
        // SAFETY: a live handle and C strings.
        unsafe { libc::dlvsym(self.0.as_ptr(), name.as_ptr(), version.as_ptr()) }
    }

    /// The loader knows no versions: null.
    #[cfg(not(target_env = "gnu"))]
    pub(crate) fn versioned(&self, _: &CStr, _: &CStr) -> *mut c_void {
        ptr::null_mut()
    }

    /// Keeps the file loaded until the process ends.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for LoadedFile {
    fn drop(&mut self) {
        // SAFETY: the reference that `dlopen` took.
        unsafe { libc::dlclose(self.0.as_ptr()) };
    }
}

/// The file that contains an address.
pub(crate) struct Containing {
    /// The loader's name for the file.
    pub(crate) name: CString,
    /// The address at which the file is loaded.
    pub(crate) base: usize,
}

/// The file that contains `address`; `None` if no file, or none with a name, contains it.
pub(crate) fn file_of(address: *const c_void) -> Option<Containing> {
    let info = information(address)?;
    // SAFETY: the loader's name for a loaded file, if it is not null.
    let name = (!info.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(info.dli_fname) })?;
    Some(Containing {
        name: name.to_owned(),
        base: info.dli_fbase.addr(),
    })
}

/// The address at which the file that contains `address` is loaded; `None` if no file contains it.
pub(crate) fn base_of(address: *const c_void) -> Option<usize> {
    information(address).map(|info| info.dli_fbase.addr())
}

fn information(address: *const c_void) -> Option<libc::Dl_info> {
    let mut info = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    // SAFETY: a local, and any address.
    (unsafe { libc::dladdr(address, &mut info) } != 0).then_some(info)
}

/// The names of the files that the loader has loaded, except the program itself, which has none.
pub(crate) fn loaded_files() -> Vec<CString> {
    unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _: usize, files: *mut c_void) -> c_int {
        // SAFETY: the pointer that dl_iterate_phdr got below, and the loader's own struct with its
        // name for the file.
        unsafe {
            let name = (*info).dlpi_name;
            if !name.is_null() {
                let files = &mut *files.cast::<Vec<CString>>();
                files.push(CStr::from_ptr(name).to_owned());
            }
        }
        0
    }
    let mut files: Vec<CString> = Vec::new();
    // SAFETY: `collect` only allocates; no dlopen happens until it is done.
    unsafe { libc::dl_iterate_phdr(Some(collect), ptr::from_mut(&mut files).cast()) };
    files.retain(|file| !file.is_empty());
    files
}

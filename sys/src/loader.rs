//! The dynamic loader: the files in the process, and the symbols in them.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::{self, NonNull};

use crate::Plain;

/// The first definition of a symbol in the program's search order; null if there is none.
pub fn definition(name: &CStr) -> *mut c_void {
    symbol(libc::RTLD_DEFAULT, name)
}

/// The next definition of a symbol after that of the calling file; null if there is none.
pub fn next_definition(name: &CStr) -> *mut c_void {
    symbol(libc::RTLD_NEXT, name)
}

fn symbol(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: a pseudo handle, or that of a `LoadedFile`, and a C string.
    unsafe { libc::dlsym(handle, name.as_ptr()) }
}

/// A file that the program has loaded, which stays loaded as long as this value exists.
#[derive(Debug)]
pub struct LoadedFile(NonNull<c_void>);

impl LoadedFile {
    /// The loaded file of this name; `None` if there is none.
    pub fn find(name: &CStr) -> Option<LoadedFile> {
        // SAFETY: the name is a C string; NOLOAD runs no constructor.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        NonNull::new(handle).map(LoadedFile)
    }

    /// Loads the file of this name, and runs its constructors if it was not loaded yet.
    ///
    /// # Errors
    /// The loader's message.
    ///
    /// # Safety
    /// The constructors of the file, and of those that it needs, may run here.
    pub unsafe fn load(name: &CStr) -> Result<LoadedFile, String> {
        // SAFETY: the name is a C string, and the caller promises this of the constructors.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        NonNull::new(handle).map(LoadedFile).ok_or_else(|| {
            // SAFETY: null, or a text that lives until the next call of this thread to the loader.
            let text = unsafe { libc::dlerror().as_ref().map(|text| CStr::from_ptr(text)) };
            text.map_or_else(
                || "unknown error".to_owned(),
                |text| text.to_string_lossy().into_owned(),
            )
        })
    }

    /// A symbol of the file, or of those that it needs; null if there is none.
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        symbol(self.0.as_ptr(), name)
    }

    /// A symbol with this version; null if there is none.
    #[cfg(target_env = "gnu")]
    pub fn versioned(&self, name: &CStr, version: &CStr) -> *mut c_void {
        // SAFETY: a live handle and C strings.
        unsafe { libc::dlvsym(self.0.as_ptr(), name.as_ptr(), version.as_ptr()) }
    }

    /// The loader knows no versions: null.
    #[cfg(not(target_env = "gnu"))]
    pub fn versioned(&self, _: &CStr, _: &CStr) -> *mut c_void {
        ptr::null_mut()
    }

    /// Keeps the file loaded until the process ends.
    pub fn keep(self) {
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
#[derive(Debug)]
pub struct Containing {
    /// The function, or variable, that the file exports there.
    pub symbol: Option<CString>,
    /// The loader's name for the file.
    pub name: CString,
    /// The address at which the file is loaded.
    pub base: usize,
}

/// The file that contains `address`; `None` if no file, or none with a name, contains it.
pub fn file_of(address: *const c_void) -> Option<Containing> {
    let info = information(address)?;
    // SAFETY: the loader's names for a loaded file and for a symbol in it, if they are not null.
    let text =
        |text: *const std::ffi::c_char| (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_owned());
    Some(Containing {
        symbol: text(info.dli_sname),
        name: text(info.dli_fname)?,
        base: info.dli_fbase.addr(),
    })
}

/// The address at which the file that contains `address` is loaded; `None` if no file contains it.
pub fn base_of(address: *const c_void) -> Option<usize> {
    information(address).map(|info| info.dli_fbase.addr())
}

fn information(address: *const c_void) -> Option<libc::Dl_info> {
    let mut info = libc::Dl_info::zeroes();
    // SAFETY: a local, and any address.
    (unsafe { libc::dladdr(address, &mut info) } != 0).then_some(info)
}

/// The names of the files that the loader has loaded, except the program itself, which has none.
pub fn loaded_files() -> Vec<CString> {
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

//! Memory windows: this file makes and destroys them, work requests bind them.

use rustix::io::Errno;
use urnic_device::command::{CreateMw, Handle, Opcode};

use crate::driver::Driver;
use crate::objects::Pd;

impl Driver {
    /// Creates an unbound window of `kind` 1 or 2 (`enum ibv_mw_type`). Returns its STag, which
    /// includes the key.
    ///
    /// # Errors
    /// `EINVAL` for another kind; `ENOMEM` if the device has no room; `EIO` in a forked child.
    pub fn alloc_mw(&self, pd: &Pd, kind: u32) -> Result<u32, Errno> {
        self.check_usable()?;
        let arguments = CreateMw {
            pd: pd.id.into(),
            kind: kind.into(),
        };
        let handle: Handle = self.commands.call(Opcode::CreateMw, &arguments)?;
        Ok(handle.id.get())
    }

    /// Destroys a window, bound or not. `stag` may have any key in its low byte: the program
    /// chooses the key of a type 2 window.
    ///
    /// # Errors
    /// `EIO` in a forked child.
    pub fn dealloc_mw(&self, stag: u32) -> Result<(), Errno> {
        self.check_process()?;
        self.commands.destroy(Opcode::DestroyMw, stag)
    }
}

//! The release of rdma-core in use.
//!
//! The private ABI number ([`Pabi`]) names the symbols and the plug-in file. Layouts changed within
//! one number, so the layout has its own scale ([`Level`]). Both are determined at run time from
//! the library's symbols.

use core::ffi::CStr;

/// The number in `libNAME-rdmavNN.so`, `verbs_register_driver_NN` and the symbol version
/// `IBVERBS_PRIVATE_NN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pabi {
    /// rdma-core 34 – 56.
    V34,
    /// rdma-core 57 – 58.
    V57,
    /// rdma-core 59 – 63.
    V59,
    /// rdma-core 64.
    V64,
    /// rdma-core 65.
    V65,
}

impl Pabi {
    /// Every private ABI so far, oldest first.
    pub const ALL: [Pabi; 5] = [Pabi::V34, Pabi::V57, Pabi::V59, Pabi::V64, Pabi::V65];

    /// The private ABI number.
    pub const fn number(self) -> u32 {
        match self {
            Pabi::V34 => 34,
            Pabi::V57 => 57,
            Pabi::V59 => 59,
            Pabi::V64 => 64,
            Pabi::V65 => 65,
        }
    }

    /// The symbol with which a provider registers its `verbs_device_ops`.
    pub const fn register_symbol(self) -> &'static CStr {
        match self {
            Pabi::V34 => c"verbs_register_driver_34",
            Pabi::V57 => c"verbs_register_driver_57",
            Pabi::V59 => c"verbs_register_driver_59",
            Pabi::V64 => c"verbs_register_driver_64",
            Pabi::V65 => c"verbs_register_driver_65",
        }
    }

    /// The symbol version of all private symbols.
    pub const fn symbol_version(self) -> &'static CStr {
        match self {
            Pabi::V34 => c"IBVERBS_PRIVATE_34",
            Pabi::V57 => c"IBVERBS_PRIVATE_57",
            Pabi::V59 => c"IBVERBS_PRIVATE_59",
            Pabi::V64 => c"IBVERBS_PRIVATE_64",
            Pabi::V65 => c"IBVERBS_PRIVATE_65",
        }
    }

    /// The name of the file that libibverbs loads for driver `urnic`.
    pub const fn provider_file(self) -> &'static str {
        match self {
            Pabi::V34 => "liburnic-rdmav34.so",
            Pabi::V57 => "liburnic-rdmav57.so",
            Pabi::V59 => "liburnic-rdmav59.so",
            Pabi::V64 => "liburnic-rdmav64.so",
            Pabi::V65 => "liburnic-rdmav65.so",
        }
    }
}

/// A layout of `verbs_context_ops` and `verbs_context`, named by the first rdma-core that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// rdma-core 34.
    V34,
    /// rdma-core 35: `import_dm`, `unimport_dm`.
    V35,
    /// rdma-core 36 – 58: `query_qp_data_in_order`.
    V36,
    /// rdma-core 59 – 61: DMA handles, `reg_mr_ex`.
    V59,
    /// rdma-core 62 – 63: `dm_export_dmabuf_fd`, `query_port_speed`.
    V62,
    /// rdma-core 64: `alloc_buf`, `free_buf`.
    V64,
    /// rdma-core 65: completion counters.
    V65,
}

impl Level {
    /// Every level, oldest first.
    pub const ALL: [Level; 7] = [
        Level::V34,
        Level::V35,
        Level::V36,
        Level::V59,
        Level::V62,
        Level::V64,
        Level::V65,
    ];

    /// The level of a libibverbs, given whether it exports a public symbol.
    ///
    /// Public symbols are never withdrawn, so the newest marker present decides.
    pub fn detect(mut exports: impl FnMut(&CStr) -> bool) -> Level {
        const MARKERS: [(&CStr, Level); 6] = [
            (c"ibv_create_comp_cntr", Level::V65),
            (c"ibv_alloc_buf", Level::V64),
            (c"ibv_dm_export_dmabuf_fd", Level::V62),
            (c"ibv_alloc_dmah", Level::V59),
            (c"ibv_query_qp_data_in_order", Level::V36),
            (c"ibv_import_dm", Level::V35),
        ];
        MARKERS
            .iter()
            .find(|(symbol, _)| exports(symbol))
            .map_or(Level::V34, |&(_, level)| level)
    }

    /// Offset of `ibv_context` in `verbs_context`, in bytes. `verbs_context` grows at its front.
    pub const fn context_offset(self) -> usize {
        match self {
            Level::V34 | Level::V35 | Level::V36 => 320,
            Level::V59 => 344,
            Level::V62 => 352,
            Level::V64 | Level::V65 => 368,
        }
    }
}

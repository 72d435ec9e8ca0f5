//! Structures of the interface, whose layout is that of C.

/// Defines structures, each with the names and offsets of its fields.
macro_rules! layouts {
    ($($(#[$m:meta])* $name:ident { $($(#[$fm:meta])* $f:ident: $t:ty,)* })*) => { $(
        $(#[$m])*
        #[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[$fm])* pub $f: $t,)* }

        impl $name {
            /// The names and offsets of the fields.
            pub const FIELDS: &'static [(&'static str, usize)] =
                &[$((stringify!($f), std::mem::offset_of!($name, $f)),)*];
        }
    )* };
}
pub(crate) use layouts;

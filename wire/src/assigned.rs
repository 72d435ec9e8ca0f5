//! Numbers that an RFC assigns.

/// Defines an enum of assigned numbers, each with the text that its `Display` shows, and the list
/// of all.
macro_rules! assigned {
    ($(#[$meta:meta])* $name:ident: $number:ty { $($(#[$of_value:meta])* $value:ident = $code:literal => $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr($number)]
        pub enum $name { $($(#[$of_value])* $value = $code,)+ }

        impl $name {
            /// All, in ascending order.
            pub const ALL: [Self; [$($code),+].len()] = [$(Self::$value),+];
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str(match self { $(Self::$value => $text,)+ })
            }
        }
    };
}
pub(crate) use assigned;

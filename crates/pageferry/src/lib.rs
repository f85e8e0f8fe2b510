//! Live migration of KVM guests that leaves free pages behind: the library a VMM embeds

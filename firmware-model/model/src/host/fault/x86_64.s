# Accesses to memory that may vanish. A fault at any instruction between the two labels `urnic_guarded_begin` and `urnic_guarded_end` goes on at
# `urnic_guarded_failed` (fault/handler.rs). That works because nothing here moves the stack pointer or changes a callee-saved register.

    .section .data.rel.ro.urnic_guarded, "aw"
# struct rseq_cs: version, flags, first instruction, length, where an interrupted thread continues.
    .macro urnic_section name
    .p2align 5
urnic_guarded_\name\()_section:
    .long 0, 0
    .quad urnic_guarded_\name\()_begin
    .quad urnic_guarded_\name\()_end - urnic_guarded_\name\()_begin
    .quad urnic_guarded_interrupted
    .endm
    urnic_section word
    urnic_section bytes
    urnic_section add
    urnic_section swap

    .text
    .p2align 6
    .hidden urnic_guarded_begin, urnic_guarded_end, urnic_guarded_failed
    .globl urnic_guarded_begin, urnic_guarded_end, urnic_guarded_failed
    .hidden urnic_guarded_copy, urnic_guarded_probe, urnic_guarded_load, urnic_guarded_compare_exchange, urnic_guarded_copy_if, urnic_guarded_atomic_if
    .globl urnic_guarded_copy, urnic_guarded_probe, urnic_guarded_load, urnic_guarded_compare_exchange, urnic_guarded_copy_if, urnic_guarded_atomic_if
urnic_guarded_begin:

# eax = urnic_guarded_copy(rdi = to, rsi = from, rdx = bytes): 0, or 1 after a fault.
    .type urnic_guarded_copy, @function
urnic_guarded_copy:
    .cfi_startproc
    cmp rdx, 16
    jb 3f
    cmp rdx, 32
    ja 1f
    movups xmm0, [rsi]
    movups xmm1, [rsi + rdx - 16]
    movups [rdi], xmm0
    movups [rdi + rdx - 16], xmm1
    xor eax, eax
    ret
1:  cmp rdx, 64
    ja 4f
    movups xmm0, [rsi]
    movups xmm1, [rsi + 16]
    movups xmm2, [rsi + rdx - 32]
    movups xmm3, [rsi + rdx - 16]
    movups [rdi], xmm0
    movups [rdi + 16], xmm1
    movups [rdi + rdx - 32], xmm2
    movups [rdi + rdx - 16], xmm3
    xor eax, eax
    ret

# Fewer than 16 bytes: two loads that may overlap.
3:  cmp edx, 8
    jb 31f
    mov rax, [rsi]
    mov rcx, [rsi + rdx - 8]
    mov [rdi], rax
    mov [rdi + rdx - 8], rcx
    xor eax, eax
    ret
31: cmp edx, 4
    jb 32f
    mov eax, [rsi]
    mov ecx, [rsi + rdx - 4]
    mov [rdi], eax
    mov [rdi + rdx - 4], ecx
    xor eax, eax
    ret
32: test edx, edx
    jz 33f
    movzx eax, byte ptr [rsi]
    mov [rdi], al
    cmp edx, 1
    je 33f
    movzx ecx, word ptr [rsi + rdx - 2]
    mov [rdi + rdx - 2], cx
33: xor eax, eax
    ret

# More than 64 bytes: 64 at a time, the last 64 again.
4:  cmp rdx, 4096
    jae 5f
    lea r8, [rsi + rdx - 64]
    lea r9, [rdi + rdx - 64]
    .p2align 4
41: movups xmm0, [rsi]
    movups xmm1, [rsi + 16]
    movups xmm2, [rsi + 32]
    movups xmm3, [rsi + 48]
    add rsi, 64
    movups [rdi], xmm0
    movups [rdi + 16], xmm1
    movups [rdi + 32], xmm2
    movups [rdi + 48], xmm3
    add rdi, 64
    cmp rdi, r9
    jb 41b
    movups xmm0, [r8]
    movups xmm1, [r8 + 16]
    movups xmm2, [r8 + 32]
    movups xmm3, [r8 + 48]
    movups [r9], xmm0
    movups [r9 + 16], xmm1
    movups [r9 + 32], xmm2
    movups [r9 + 48], xmm3
    xor eax, eax
    ret

# From 4096 bytes on the processor's own copy is as fast as any loop.
5:  mov rcx, rdx
    rep movsb
    xor eax, eax
    ret
    .cfi_endproc
    .size urnic_guarded_copy, . - urnic_guarded_copy

# eax = urnic_guarded_probe(rdi = first byte, rsi = last byte): 0, or 1 after a fault. Reads a byte of each page.
    .type urnic_guarded_probe, @function
    .p2align 4
urnic_guarded_probe:
    .cfi_startproc
1:  movzx eax, byte ptr [rdi]
    add rdi, 4096
    cmp rdi, rsi
    jb 1b
    movzx eax, byte ptr [rsi]
    xor eax, eax
    ret
    .cfi_endproc
    .size urnic_guarded_probe, . - urnic_guarded_probe

# eax = urnic_guarded_load(rdi = aligned word, rsi = result): 0, or 1 after a fault.
    .type urnic_guarded_load, @function
    .p2align 4
urnic_guarded_load:
    .cfi_startproc
    mov rax, [rdi]
    mov [rsi], rax
    xor eax, eax
    ret
    .cfi_endproc
    .size urnic_guarded_load, . - urnic_guarded_load

# eax = urnic_guarded_compare_exchange(rdi = aligned word, rsi = expected, rdx = new, rcx = what was there): 0, or 1 after a fault.
    .type urnic_guarded_compare_exchange, @function
    .p2align 4
urnic_guarded_compare_exchange:
    .cfi_startproc
    mov rax, rsi
    lock cmpxchg [rdi], rdx
    mov [rcx], rax
    xor eax, eax
    ret
    .cfi_endproc
    .size urnic_guarded_compare_exchange, . - urnic_guarded_compare_exchange

# eax = urnic_guarded_copy_if(rdi = struct CopyIf, rsi = rseq_cs of the thread's struct rseq): 0, 1 after a fault, 2 if a word has another
# value, or 3 after an interruption. The copy is a critical section of rseq(2) from the first check to the store of the last byte, so a thread
# that was preempted, signalled or stopped goes on at `urnic_guarded_interrupted`, and the last byte is stored once. The signal of a fault
# interrupts the section, too: then the handler finds that label in place of the instruction.
    .macro urnic_check_conditions
    mov rax, [r8]
    mov rax, [rax]
    cmp rax, [r8 + 8]
    jne urnic_guarded_refused
    mov rax, [r8 + 16]
    mov rax, [rax]
    cmp rax, [r8 + 24]
    jne urnic_guarded_refused
    .endm

    .type urnic_guarded_copy_if, @function
    .p2align 4
urnic_guarded_copy_if:
    .cfi_startproc
    mov r8, rdi
    mov r9, rsi
    mov rcx, [r8 + 48]
    mov rsi, [r8 + 40]
    mov rdi, [r8 + 32]
    cmp rcx, 8
    jne 2f
    lea rax, [rip + urnic_guarded_word_section]
    mov [r9], rax
urnic_guarded_word_begin:
    urnic_check_conditions
    mov rax, [rsi]
    mov [rdi], rax
urnic_guarded_word_end:
    mov qword ptr [r9], 0
    xor eax, eax
    ret
2:  lea rax, [rip + urnic_guarded_bytes_section]
    mov [r9], rax
urnic_guarded_bytes_begin:
    urnic_check_conditions
    rep movsb
urnic_guarded_bytes_end:
    mov qword ptr [r9], 0
    xor eax, eax
    ret
    .cfi_endproc
    .size urnic_guarded_copy_if, . - urnic_guarded_copy_if

# As urnic_guarded_copy_if, for an atomic operation: `to` is an aligned word, and `from` has the number to add or to compare with, the word to
# store, and room for the word that was there. `len` is 0 to add, or 1 to compare and swap.
    .type urnic_guarded_atomic_if, @function
    .p2align 4
urnic_guarded_atomic_if:
    .cfi_startproc
    mov r8, rdi
    mov r9, rsi
    mov rdi, [r8 + 32]
    mov rsi, [r8 + 40]
    mov rcx, [rsi]
    mov rdx, [rsi + 8]
    cmp qword ptr [r8 + 48], 0
    jne 2f
    lea rax, [rip + urnic_guarded_add_section]
    mov [r9], rax
urnic_guarded_add_begin:
    urnic_check_conditions
    lock xadd [rdi], rcx
urnic_guarded_add_end:
    mov [rsi + 16], rcx
    mov qword ptr [r9], 0
    xor eax, eax
    ret
2:  lea rax, [rip + urnic_guarded_swap_section]
    mov [r9], rax
urnic_guarded_swap_begin:
    urnic_check_conditions
    mov rax, rcx
    lock cmpxchg [rdi], rdx
urnic_guarded_swap_end:
    mov [rsi + 16], rax
    mov qword ptr [r9], 0
    xor eax, eax
    ret
urnic_guarded_refused:
    mov qword ptr [r9], 0
    mov eax, 2
    ret

# The kernel requires the signature of the thread's registration (glibc's RSEQ_SIG) before the place of continuation: here inside of `ud1`.
    .byte 0x0f, 0xb9, 0x3d
    .long 0x53053053
urnic_guarded_interrupted:
    mov eax, 3
    ret
    .cfi_endproc
    .size urnic_guarded_atomic_if, . - urnic_guarded_atomic_if

urnic_guarded_end:
    .type urnic_guarded_failed, @function
urnic_guarded_failed:
    .cfi_startproc
    mov eax, 1
    ret
    .cfi_endproc
    .size urnic_guarded_failed, . - urnic_guarded_failed

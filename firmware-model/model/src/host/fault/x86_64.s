# Accesses to memory that may vanish. A fault at any instruction between the two labels `urnic_guarded_begin` and `urnic_guarded_end` goes on at
# `urnic_guarded_failed` (fault/handler.rs). That works because nothing here moves the stack pointer or changes a callee-saved register.

    .text
    .p2align 6
    .hidden urnic_guarded_begin, urnic_guarded_end, urnic_guarded_failed
    .globl urnic_guarded_begin, urnic_guarded_end, urnic_guarded_failed
    .hidden urnic_guarded_copy, urnic_guarded_probe, urnic_guarded_load, urnic_guarded_compare_exchange
    .globl urnic_guarded_copy, urnic_guarded_probe, urnic_guarded_load, urnic_guarded_compare_exchange
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

urnic_guarded_end:
    .type urnic_guarded_failed, @function
urnic_guarded_failed:
    .cfi_startproc
    mov eax, 1
    ret
    .cfi_endproc
    .size urnic_guarded_failed, . - urnic_guarded_failed

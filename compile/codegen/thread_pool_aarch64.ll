target triple = "aarch64-linux-gnu"

@futex = internal constant i64 98                  ; the system call's number

declare void @llvm.aarch64.hint(i32)

define internal void @pause() {                    ; between two looks at memory that another processor writes
  call void @llvm.aarch64.hint(i32 1)              ; yield
  ret void
}

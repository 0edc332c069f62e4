target triple = "x86_64-linux-gnu"

@futex = internal constant i64 202                 ; the system call's number

declare void @llvm.x86.sse2.pause()

define internal void @pause() {                    ; between two looks at memory that another processor writes
  call void @llvm.x86.sse2.pause()
  ret void
}
